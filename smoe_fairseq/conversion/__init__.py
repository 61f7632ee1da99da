"""Makes one checkpoint of another: of other layers, of other tools."""
