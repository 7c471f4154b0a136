# SPDX-License-Identifier: Apache-2.0
"""What runs on Trainium: one NKI kernel file per operator, with its host-side launch.

Kernel functions are portable NKI 0.6: plain loops, named arguments, no comprehension, no operator on tensors. They
import NKI through `.nki`, which gives the real package or the simulator, so the same source runs on a device and here.
"""
