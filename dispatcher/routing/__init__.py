"""Which provider gets the next attempt, and when: order, failover, pauses, circuit breakers and rate ceilings.

    breaker   whether one provider may be tried now
    evidence  whether refusals count against the provider or the email
    rate      how fast, over all hosts
    routes    the providers in their order, each with both

Nothing here sends or records: the worker does.
"""
