"""Echo, a model without weights: the tutorial of a model plugin, and the model the core is tested with."""
