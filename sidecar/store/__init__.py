"""The store: tables, migrations, and how a process opens the database."""
