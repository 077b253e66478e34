"""What the pages say, made of the replies of the admin API: sentences, rows, charts. All pure."""
