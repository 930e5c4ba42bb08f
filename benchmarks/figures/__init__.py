"""Draws the documentation's figures, light and dark: docs/figures/*.svg."""
