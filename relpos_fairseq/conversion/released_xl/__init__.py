"""Models of Transformer-XL's released PyTorch code (Dai et al. 2019): `model.pt` to one of ours."""
