"""The device families: `NAME.py` says what one can do, `NAME.txt` which packages it needs. Installed as `vllm_omni_platforms`."""
