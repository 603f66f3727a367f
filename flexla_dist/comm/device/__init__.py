"""The exchange between ranks as one kernel: verbs, scan of a panel, and the emitted source."""
