"""The leading relay publishes due rows of the whole database to RabbitMQ.

publish_loop  runs one round after another, and the leader's services between them
leadership    elects the relay that publishes: a relay that is connected to RabbitMQ, if there is any
pointers      publishes due emails to the send queues; remembers them until their due mark is cleared
shares        decides how many emails of each lane and tenant may be published now
lane_queue    the send queue of a lane: how many more emails may be published, and publishing
timing        makes waiting emails due when their time has come; cancels expired emails
dead_letters  publishes failed and held emails to the DLQ
queue_writer  publishes to one queue, with a backoff
"""
