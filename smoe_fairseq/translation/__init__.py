"""Text in, text out: a trained model's translations, on the fast way where the model is ours."""
