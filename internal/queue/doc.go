// Package queue is a GPU for the ops of this module: one queue of work, device memory that is reused without the
// driver, and pinned memory for copies. The package knows neither tensors nor attention.
//
// # Order
//
// All work of a [Queue] is on one stream, and so runs in the order of queueing. So freed memory can be allocated
// again at once: a new owner writes after the last queued reader. The host also reads and writes pinned memory, so a
// pinned block carries an event and is reused after the event has passed. The stream may defer small copies and the
// events behind them. Waiting for such an event, or queueing other work, queues the deferred copies.
//
// # Several devices
//
// A [Group] has a queue for each of its devices, which reach each other's memory. All work follows the order of the
// first queue: other queues fork from the first and join it by events, within [Submission.Each]. So freed memory of
// any member can be allocated again at once, and a recording is one graph.
//
// # Values of nodes
//
// A node of a graph makes a value at every run, and the value of the run before is dead by then. Gorgonia's machines
// keep a value no longer than until the node is bound anew, copy values that must survive, and write only to tensors.
// So a node keeps its memory in a [Slot] and fills it again at every run. A user may still hold an old value: kept by
// hand, or in clones of a graph, which share their ops, running at the same time. The value's generation then
// differs, and the use is [ErrOverwritten], never another run's numbers.
//
// # Locks
//
// Calls are made between Enter and Leave, which keep Close out. Work that belongs together is queued within one
// Submit.
package queue
