"""Figures of a frame of records: functions from a table to a `Chart`, which is Vega-Lite, PNG, SVG and PDF."""
