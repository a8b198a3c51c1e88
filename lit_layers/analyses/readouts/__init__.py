"""Readouts: what each layer, or a model in another order of its blocks, predicts through norm and head."""
