"""Which provider gets the next attempt, and when: order, failover, pauses, circuit breakers and rate ceilings.

    breaker       whether one provider may be tried now
    evidence      whether refusals count against the provider or the email
    gate          how many attempts one worker makes at one provider at the same time
    rate          a provider's rate ceiling, over all hosts
    domain_gates  the ceilings of recipient domains, over all hosts
    routes        the providers in order, each with its breaker and rate limit

This package only decides. The worker sends and records.
"""
