"""The leading relay publishes due rows of the whole database to RabbitMQ.

publish_loop  runs one round after another, and the leader's services between the rounds
leadership    elects the relay that publishes; prefers a relay that is connected to RabbitMQ
pointers      publishes due emails to the send queues; remembers each email until its due mark is cleared
shares        decides how many emails of each lane and tenant may be published now
queues        publishes to one queue, with a backoff; limits how many emails are on a lane's send queue
timing        makes waiting emails due when their time has come; cancels expired emails
domain_waits  shortens the waits for a recipient domain after an operator raised or removed its ceiling
dead_letters  publishes failed and held emails to the DLQ
"""
