"""Log events, metrics and spans of all processes; each event and metric is declared once.

events            every log event
log               structured logging: JSON lines, or text on a terminal
log_writer        writes log lines without waiting for a slow reader
quick_log         a faster log for the events that are logged for each email
storms            limits how often one event is logged
metrics           every metric that processes count
meters            counters, gauges and histograms
metric_files      the memory-mapped files in which a process counts, and their validation
scrape            the metrics of all processes of a host, merged
tracing           spans, if they are enabled
spans             creates the spans; the only module that imports OpenTelemetry
"""
