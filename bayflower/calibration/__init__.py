"""Calibration: functions of class probabilities on held-out samples, and sums that add up exactly.

`curves.py`     NLL by scale of the posterior and by temperature: the gate and temperature scaling
`conformal.py`  prediction sets from histograms of scores
`trust.py`      tallies of what a person may rely on: Brier score, sets, detection of errors
"""
