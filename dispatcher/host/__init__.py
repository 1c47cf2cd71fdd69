"""What the processes of one host share: the ledger of emails on the wire, the roster, the clock, and how they stop."""
