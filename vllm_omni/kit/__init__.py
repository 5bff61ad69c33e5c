"""Parts that plugins build their models from."""
