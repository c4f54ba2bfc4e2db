// Package ptx executes GPU kernels on the host from their PTX. It is slow and strict. Tests use it on
// machines without a GPU.
//
// Each thread has its own program counter (independent thread scheduling). Threads of a warp that are at the
// same instruction execute it together. The group that is furthest behind runs first, and sometimes another
// group does. Warps run in an order that the seed decides. Behavior that PTX leaves open is chosen to reveal
// errors:
//
//   - An asynchronous copy happens at any time until it is waited for.
//   - Shared memory starts as NaN.
//   - An instruction that needs all threads of a warp waits for them.
//
// Each of the following is an error that names the instruction and its threads:
//
//   - an access outside of the memory, or at an address that is not a multiple of the type's size
//   - an operand of a warp-group product that changes before the product has been waited for
//   - an access to shared memory of a block that has ended
//   - a copy that is never waited for
//   - a deadlock
//   - an instruction that this package does not implement
//
// Launches run one after the other. If they may overlap (programmatic dependent launch), two accesses before
// griddepcontrol.wait are errors: a read of memory that the previous launch writes, and a write to memory
// that the previous launch reads or writes.
//
// Several GPUs run at the same time by [RunTogether], or in turns by [Start.Begin]. Stores to the memory of
// another GPU arrive late and in any order, until an operation of the system scope orders them (peer.go).
//
// The package does not model:
//
//   - weak ordering within a GPU: every write is visible to all threads at once
//   - time: %globaltimer advances, and it advances fast while all threads wait
//   - caches
//   - the rounding of the tensor cores' sums
package ptx
