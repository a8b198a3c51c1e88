"""Probes of features: logistic and ridge regressions of all layers at once, and an attentive probe over tokens."""
