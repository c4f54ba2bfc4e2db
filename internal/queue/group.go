package queue

import (
	"errors"
	"slices"

	"gorgonia.org/leanattention/internal/cuda"
)

// Group is the devices that compute a graph together. Each device reaches the memory of all others. Calls for all
// devices are made on the group: to enter, close, wait, record.
//
// The first member leads. Work of the others begins after the work queued on the first member, and later work of the
// first member begins after theirs ([Submission.Each]). So all work of a group is in the order of its first queue,
// like the work of one device. Only work in per-GPU mode ([Submission.PerGPU]) is in the order of each member, until
// the first member does something else.
type Group struct {
	members []*Queue
	fork    *cuda.Event // where others begin; nil in a group of one

	// The first member's mu guards the fields below.
	perGPU bool // members may have work for which the first member does not wait yet
	within bool // the first member's part of per-GPU work is being queued
}

// OpenGroup makes a group of open devices, in this order. After an error nothing is left but the devices.
func OpenGroup(devs ...*cuda.Device) (g *Group, err error) {
	g = &Group{}
	defer func() {
		if err != nil {
			_ = g.Close() // the first error has more detail
			g = nil
		}
	}()
	for _, dev := range devs {
		for _, other := range devs {
			if dev == other {
				continue
			}
			if err := dev.Reach(other); err != nil {
				return g, err
			}
		}
		q, err := open(dev)
		if err != nil {
			return g, err
		}
		q.group = g
		g.members = append(g.members, q)
	}
	if len(devs) > 1 {
		if g.fork, err = devs[0].NewEvent(false); err != nil {
			return g, err
		}
		for _, q := range g.members[1:] {
			if q.join, err = q.dev.NewEvent(false); err != nil {
				return g, err
			}
		}
	}
	return g, nil
}

// Each calls f for each member, to queue work that runs on all members at the same time: after the work queued on the
// first member, whose submission t is, and before later work. f is called for the first member last.
func (t *Submission) Each(f func(member int, t *Submission) error) error {
	if len(t.group.members) == 1 {
		return f(0, t)
	}
	return t.spread(t.group.members[1:], func() error { return f(0, t) }, f)
}

// On is Each for one member.
func (t *Submission) On(member int, f func(t *Submission) error) error {
	if member == 0 {
		return f(t)
	}
	only := func(_ int, t *Submission) error { return f(t) }
	return t.spread(t.group.members[member:member+1], func() error { return nil }, only)
}

// PerGPU queues work in per-GPU mode: f is called for each member, for the first member last. The work needs nothing
// of another member except what the work itself exchanges, and no other work reads or writes its memory.
//
//   - A member's work runs after the member's earlier per-GPU work.
//   - As with [Submission.Each], all of it runs after the work queued on the first member, whose submission t is, and
//     before later work of the first member.
//   - Without other work in between, members begin and end without waiting for each other.
//
// ready is called for each member before f, to allocate memory and load kernels: a member that waits for another
// member can do neither, and work of some members alone would wait forever. ready queues nothing. After an error of
// ready nothing is queued.
func (t *Submission) PerGPU(ready, f func(member int, t *Submission) error) error {
	g := t.group
	others := g.members[1:]
	for _, q := range others {
		q.mu.Lock()
		defer q.mu.Unlock()
	}
	for i, q := range others {
		if err := ready(i+1, (*Submission)(q)); err != nil {
			return err
		}
	}
	if err := g.ownPart(func() error { return ready(0, t) }); err != nil {
		return err
	}
	if len(others) == 0 {
		return f(0, t)
	}
	if !g.perGPU {
		if err := t.fork(others); err != nil {
			return err
		}
	}
	for i, q := range others {
		if err := f(i+1, (*Submission)(q)); err != nil {
			return err
		}
	}
	return g.ownPart(func() error { return f(0, t) })
}

// ownPart calls f, which queues the first member's part of per-GPU work.
func (g *Group) ownPart(f func() error) error {
	g.within = true
	defer func() { g.within = false }()
	return f()
}

// fork makes members begin after the work queued on the first member. Their queues are locked.
func (t *Submission) fork(others []*Queue) error {
	g := t.group
	if err := t.settle(); err != nil {
		return err
	}
	if err := t.stream.Record(g.fork); err != nil {
		return err
	}
	g.perGPU = true // also if some can't wait: the first member must wait for what the others queue
	for _, q := range others {
		if err := q.stream.Wait(g.fork); err != nil {
			if t.recording == nil {
				_ = t.stream.Synchronize() // keeps the order of later work
			}
			return err
		}
	}
	return nil
}

// Finish waits for all work of all members.
func (t *Submission) Finish() (first error) {
	for _, q := range t.group.members {
		if err := q.stream.Synchronize(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// mustMeet reports whether t is the first member's and others may have per-GPU work for which the next work has to
// wait.
func (t *Submission) mustMeet() bool {
	g := t.group
	return g.perGPU && !g.within && g.members[0] == (*Queue)(t)
}

// together makes later work of the first member begin after the members' per-GPU work.
func (t *Submission) together() (err error) {
	if !t.mustMeet() {
		return nil
	}
	note := func(e error) {
		if err == nil {
			err = e
		}
	}
	t.group.perGPU = false
	note(t.settle()) // the first member's part may still be deferred
	for _, q := range t.group.members[1:] {
		q.mu.Lock()
		note((*Submission)(q).settle())
		note(t.await(q)) // also after an error: the work is queued
		q.mu.Unlock()
	}
	return err
}

// abandon ends a failed capture: members that have begun the capture join, and deferred work is dropped.
func (t *Submission) abandon() error {
	if !t.mustMeet() {
		return nil
	}
	t.group.perGPU = false
	for _, q := range t.group.members[1:] {
		q.mu.Lock()
		_ = t.await(q) // the capture has ended
		q.mu.Unlock()
	}
	return nil
}

// spread calls f to queue work on some members, and here for the first member's work.
func (t *Submission) spread(members []*Queue, here func() error, f func(int, *Submission) error) (err error) {
	note := func(e error) {
		if err == nil {
			err = e
		}
	}
	if err := t.settle(); err != nil {
		return err
	}
	if err := t.stream.Record(t.group.fork); err != nil {
		return err
	}
	begun := members[:0:0]
	for _, q := range members {
		q.mu.Lock()
		defer q.mu.Unlock()
		if note(q.stream.Wait(t.group.fork)); err != nil {
			break
		}
		begun = append(begun, q)
		if note(f(q.place(), (*Submission)(q))); err != nil {
			break
		}
		if note((*Submission)(q).settle()); err != nil {
			break
		}
	}
	if err == nil {
		note(here())
	}
	for _, q := range begun { // also after an error: the work is queued
		note(t.await(q))
	}
	return err
}

// await makes later work begin after the work of a member.
func (t *Submission) await(q *Queue) error {
	err := q.stream.Record(q.join)
	if err == nil {
		err = t.stream.Wait(q.join)
	}
	if err != nil && t.recording == nil {
		_ = q.stream.Synchronize() // keeps the order
	}
	return err
}

// place returns the member's number in its group.
func (q *Queue) place() int { return slices.Index(q.group.members, q) }

// Len returns the number of members.
func (g *Group) Len() int { return len(g.members) }

// Member returns the queue of member i.
func (g *Group) Member(i int) *Queue { return g.members[i] }

// Enter keeps all members open until Leave. Calls must not be nested.
func (g *Group) Enter() error {
	for i, q := range g.members {
		if err := q.Enter(); err != nil {
			for _, q := range g.members[:i] {
				q.Leave()
			}
			return err
		}
	}
	return nil
}

// Leave ends Enter.
func (g *Group) Leave() {
	for _, q := range g.members {
		q.Leave()
	}
}

// Close closes the queues of all members, see [Queue.Close]. Close returns cuda.ErrClosed if all are closed. The
// members record together, and the first member is closed first: so Close closes all members, or none.
func (g *Group) Close() error {
	closed := 0
	for _, q := range g.members {
		switch err := q.Close(); {
		case errors.Is(err, cuda.ErrClosed):
			closed++
		case err != nil:
			return err
		}
	}
	if closed > 0 && closed == len(g.members) {
		return cuda.ErrClosed
	}
	return nil
}

// Recording reports whether a recording is being made.
func (g *Group) Recording() bool {
	for _, q := range g.members {
		if q.isRecording() {
			return true
		}
	}
	return false
}

// Closed reports whether a member is closed. Such a group is unusable.
func (g *Group) Closed() bool {
	for _, q := range g.members {
		if q.Closed() {
			return true
		}
	}
	return false
}

// Synchronize waits for all queued work of all members. Synchronize needs Enter.
func (g *Group) Synchronize() error {
	var first error
	for _, q := range g.members { // wait for the others, too
		if err := q.Synchronize(); err != nil && first == nil {
			first = err
		}
	}
	return first
}
