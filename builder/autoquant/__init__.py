"""The search for the precision of each layer: units, what each recipe costs and loses in them, descent, measurement."""
