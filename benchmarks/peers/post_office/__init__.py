"""django-post_office: a table of queued emails and a command that sends them, run again and again; django-anymail
hands them to SendGrid.
"""
