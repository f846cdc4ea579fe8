"""BF16 rows as torch's tensors of the GPU, and bytes of tensors."""
import numpy as np
import torch


def bf16(rows):
    """uint16 rows as a tensor."""
    return torch.from_numpy(rows.view(np.int16)).cuda().view(torch.bfloat16)


def bytes_of(tensor):
    torch.cuda.synchronize()
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
