"""The block store: keys, block files, tiers and the policy over them. No gRPC, no Click here."""
