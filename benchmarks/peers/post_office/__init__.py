"""django-post_office: a table of queued emails, and a command that sends them, run repeatedly.

django-anymail passes the emails to SendGrid.
"""
