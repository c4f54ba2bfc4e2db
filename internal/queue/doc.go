// Package queue is a GPU as the ops of this module use it: one queue of work,
// memory of the GPU that is used again without asking the driver, and pinned
// memory that copies go through. It knows neither tensors nor attention.
//
// # Order
//
// All work of a [Queue] is on one stream and so runs in the order in which it
// was queued. Memory that is given back may therefore be handed out again at
// once: whoever gets it writes after the last reader was queued. Pinned memory
// is read and written by the host as well, so that it carries an event and is
// handed out again when that was passed. The stream may put small copies off, and the
// events behind them: who waits for one, or queues anything, has them queued.
//
// # Several devices
//
// A [Group] has a queue for each of its devices, which reach each other's memory. The
// work of all follows the order of the first one's queue: it forks from there and joins
// there by events, within [Submission.Each]. So memory of any member may be handed out
// again at once, too, and a recording is one graph.
//
// # Values of nodes
//
// A node of a graph makes a value at every run, and the one of the run before
// is dead by then: Gorgonia's machines keep it no longer than until the node is
// bound anew, copy it where someone wants to keep it, and write to nothing that
// is not a tensor. So a node keeps its memory in a [Slot] and fills it again at
// every run. Should somebody use an old value nevertheless (it was kept by hand,
// or clones of a graph, which share their ops, run at the same time), its
// generation tells: the use is [ErrOverwritten], never another run's numbers.
//
// # Locks
//
// Calls are made between Enter and Leave, which keep Close out; what is queued
// together is queued within one Submit.
package queue
