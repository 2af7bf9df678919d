"""A simulated GPU, and tests of the code for GPUs on it.

The device is torch's PrivateUse1 backend, named ``simgpu``. Its tensors have a device, shapes, values and addresses of
their own, so the code under test is the code that runs on CUDA: it reaches streams, events, graphs and memory through
``torch.get_device_module(device)``. What a CPU can know exactly about a launch is recorded: kernels, copies and whether
the host waits for them, other synchronisations, bytes. Orders of reads and writes on several streams are checked by
torch's CUDA sanitizer, which gets the events of this device instead of CUDA's. Times are not simulated.
"""
