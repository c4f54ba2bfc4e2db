package queue

import (
	"errors"
	"slices"

	"gorgonia.org/leanattention/internal/cuda"
)

// Group is the devices that compute a graph together. Each reaches the memory of all others. What concerns all of
// them is asked of the group: to let callers in, to close, to wait, to record.
//
// The first member leads: the work of the others begins behind what is queued on it, and what is queued on it later
// begins behind theirs ([Submission.Each]). So all work of a group is in the order of its first queue, as that of one
// device is. Only what members do apart ([Submission.Apart]) is in the order of each, until the first one does something
// else.
type Group struct {
	members []*Queue
	fork    *cuda.Event // where others begin; nil in a group of one

	// Guarded by the first member's mu.
	apart  bool // members may have work that the first one does not wait for yet
	within bool // the first one's own part of what they do apart is being queued
}

// OpenGroup makes a group of open devices, in this order. On an error nothing of it is left but the devices.
func OpenGroup(devs ...*cuda.Device) (g *Group, err error) {
	g = &Group{}
	defer func() {
		if err != nil {
			_ = g.Close() // the first error tells more
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

// Each calls f for each member, to queue work that runs at once on all of them: behind what is queued on the first
// member, whose submission t is, and before what comes behind. f is called for the first member last.
func (t *Submission) Each(f func(member int, t *Submission) error) error {
	if len(t.group.members) == 1 {
		return f(0, t)
	}
	return t.spread(t.group.members[1:], func() error { return f(0, t) }, f)
}

// On is Each of one member alone.
func (t *Submission) On(member int, f func(t *Submission) error) error {
	if member == 0 {
		return f(t)
	}
	only := func(_ int, t *Submission) error { return f(t) }
	return t.spread(t.group.members[member:member+1], func() error { return nil }, only)
}

// Apart calls f for each member, for the first one last, to queue work that needs nothing of another member but what
// they hand each other in it, and whose memory nobody else reads or writes. A member's work is behind what it has queued
// so before. As with [Submission.Each] all of it is behind what was queued on the first member, whose submission t is,
// and what is queued there later is behind all of it; but members begin and end it without waiting for each other where nothing
// else is queued between.
//
// ready is called for each member before that, to take memory and load kernels: a member that waits for another can't do so,
// and work of some members alone would wait for ever. It queues nothing. On an error of ready nothing is queued.
func (t *Submission) Apart(ready, f func(member int, t *Submission) error) error {
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
	if !g.apart {
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

// ownPart has f see the first one's part of what members do apart.
func (g *Group) ownPart(f func() error) error {
	g.within = true
	defer func() { g.within = false }()
	return f()
}

// fork has members begin behind what is queued on the first one. They are locked.
func (t *Submission) fork(others []*Queue) error {
	g := t.group
	if err := t.settle(); err != nil {
		return err
	}
	if err := t.stream.Record(g.fork); err != nil {
		return err
	}
	g.apart = true // also where some can't wait: what others queue has to be awaited
	for _, q := range others {
		if err := q.stream.Wait(g.fork); err != nil {
			if t.recording == nil {
				_ = t.stream.Synchronize() // what they queue next has its order nevertheless
			}
			return err
		}
	}
	return nil
}

// Finish waits for all that members have been given.
func (t *Submission) Finish() (first error) {
	for _, q := range t.group.members {
		if err := q.stream.Synchronize(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// mustMeet says whether t is the first member's, and others may do something apart that what is queued now has to
// wait for.
func (t *Submission) mustMeet() bool {
	g := t.group
	return g.apart && !g.within && g.members[0] == (*Queue)(t)
}

// together has what is queued on the first member begin behind what members have done apart.
func (t *Submission) together() (err error) {
	if !t.mustMeet() {
		return nil
	}
	note := func(e error) {
		if err == nil {
			err = e
		}
	}
	t.group.apart = false
	note(t.settle()) // the first one's own part may be put off still
	for _, q := range t.group.members[1:] {
		q.mu.Lock()
		note((*Submission)(q).settle())
		note(t.await(q)) // also after an error: what is queued is queued
		q.mu.Unlock()
	}
	return err
}

// abandon ends a capture that has failed: members that have begun it come back, and what is put off is queued never.
func (t *Submission) abandon() error {
	if !t.mustMeet() {
		return nil
	}
	t.group.apart = false
	for _, q := range t.group.members[1:] {
		q.mu.Lock()
		_ = t.await(q) // the capture is none any more
		q.mu.Unlock()
	}
	return nil
}

// spread has f queue work on some members, and here what the first one does meanwhile.
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
	for _, q := range begun { // also after an error: what is queued is queued
		note(t.await(q))
	}
	return err
}

// await has what is queued from now on begin behind the work of a member.
func (t *Submission) await(q *Queue) error {
	err := q.stream.Record(q.join)
	if err == nil {
		err = t.stream.Wait(q.join)
	}
	if err != nil && t.recording == nil {
		_ = q.stream.Synchronize() // the order is kept nevertheless
	}
	return err
}

// place is the number of the member in its group.
func (q *Queue) place() int { return slices.Index(q.group.members, q) }

// Len is the number of members.
func (g *Group) Len() int { return len(g.members) }

// Member is the queue of member i.
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

// Close closes the queues of all members, see [Queue.Close]. It is cuda.ErrClosed where all of them are closed. The
// members record together, and the first one is closed first: so all of them are closed, or none.
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

// Recording says whether a recording is being made.
func (g *Group) Recording() bool {
	for _, q := range g.members {
		if q.isRecording() {
			return true
		}
	}
	return false
}

// Closed says whether a member is closed: then the group can do nothing any more.
func (g *Group) Closed() bool {
	for _, q := range g.members {
		if q.Closed() {
			return true
		}
	}
	return false
}

// Synchronize waits for all that was queued on any member. It needs Enter.
func (g *Group) Synchronize() error {
	var first error
	for _, q := range g.members { // wait for the others, too
		if err := q.Synchronize(); err != nil && first == nil {
			first = err
		}
	}
	return first
}
