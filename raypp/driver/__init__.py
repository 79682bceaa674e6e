"""What runs beside the stages: the engine loop, the server around it, its view of stages, encoders and grammars."""
