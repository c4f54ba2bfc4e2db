// Package nccl is NVIDIA's library of collectives between the GPUs of several processes and
// hosts, without cgo. It is opened when [Load] is first called: nothing needs it before.
//
// A [Comm] is one rank of a communicator: one process with one GPU. A collective is queued on
// a stream, in captures, too, and every rank has to queue the same ones in the same order: it
// waits for the others, for ever. So who uses a Comm has to know whether the others are there,
// and calls [Comm.Abort] if they are not, which ends what waits.
//
// NVLink multicast (NVLS) is left alone: NCCL_NVLS_ENABLE=0 is set in the environment of the
// process before NCCL reads it, unless it is set already.
package nccl
