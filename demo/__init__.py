"""`make demo`: customers, agent, exam and a stand-in judge around the whole product."""
