"""What `python -m jax_flash` measures: `cells.py` of which shapes, `rivals.py` what stands beside,
`measure.py` how, `machine.py` where, `report.py` how it is told."""
