"""The cuda target's runtime half: runs a launch plan with cuda.bindings, numpy and cuBLASLt, nothing heavier."""
