"""What adapters will cost on machines one does not have: a roofline of prefill and decode, and what fits in memory."""
