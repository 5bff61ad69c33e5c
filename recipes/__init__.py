"""Tested recipes, `<model>/<machine>-<goal>.yaml`: data only. Installed as `vllm_omni_recipes`."""
