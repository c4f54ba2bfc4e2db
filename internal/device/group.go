package device

import (
	"errors"

	"gorgonia.org/leanattention/internal/cuda"
)

// Group is the devices that compute a graph together. Each member has a queue of its own: its work is in order, that
// of two members is not, unless it says so itself. What concerns all of them is asked of the group: to let callers
// in, to close, to wait, to record.
type Group struct{ members []*Queue }

// OpenGroup makes a group of open devices, in this order. On an error nothing of it is left but the devices.
func OpenGroup(devs ...*cuda.Device) (*Group, error) {
	g := &Group{}
	for _, dev := range devs {
		q, err := Open(dev)
		if err != nil {
			_ = g.Close() // the first error tells more
			return nil, err
		}
		g.members = append(g.members, q)
	}
	return g, nil
}

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

// Close closes the queues of all members, see [Queue.Close]. It is cuda.ErrClosed where all of them are closed.
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
