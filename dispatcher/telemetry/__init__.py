"""What the processes say of themselves: log events and metrics, each declared once.

events            every log event
log               how they are written
metrics           every metric that processes count
meters            what a counter, a gauge and a histogram do
metric_files      where a process counts: memory-mapped files, one per kind and slot; what of one can be believed
scrape            all of them as one picture
tracing           spans, where they are wanted
spans             OpenTelemetry's side of them; the one module that imports it
"""
