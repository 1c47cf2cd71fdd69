"""django-post_office: a table of queued emails, and a command that is run repeatedly and sends the queued emails.

django-anymail passes the emails to SendGrid.
"""
