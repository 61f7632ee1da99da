"""``smoe serve``: a trained model behind a page in the browser and a JSON endpoint."""
