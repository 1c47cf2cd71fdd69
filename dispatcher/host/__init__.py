"""What the processes of one host share: the ledger of emails on the wire, the roster, the clock, how they stop, the web
server for their pages, and the batches in which they hand work on."""
