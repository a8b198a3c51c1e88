"""Figures of a frame of records: functions that return a `Chart`, which renders as Vega-Lite, PNG, SVG and PDF."""
