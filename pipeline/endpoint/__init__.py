"""The endpoint that agents written elsewhere sample from: OpenAI's chat completions on the loopback interface.

`openai_endpoint.py` is what users give to a RolloutEngine; `pipeline/rollouts/agent_loop.py` is a rollout that an agent
drives. docs/endpoint.md says what is spoken.
"""
