// Package device opens NVIDIA GPUs, keeps tensors on them, copies values between host and GPU within a graph, and records the
// work of a graph's run, so that it is queued again as one.
//
//	gpu, err := device.Open(0)
//	...
//	defer gpu.Close()
//	w, err := gpu.Upload(weights)            // the value of an input
//	y, err := device.ToHost(nodeOnTheGPU)    // a node of the graph
//
// Ops of this module compute where their inputs are. Package leanattention has the kinds of errors.
package device
