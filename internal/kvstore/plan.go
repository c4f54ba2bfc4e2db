package kvstore

import (
	"errors"
	"fmt"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/internal/ongpu"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/queue"
)

var (
	errWithoutTrees = fmt.Errorf("%w: a sequence has a tree, and none had one then", ongpu.ErrNotReady)
	errOneToken     = fmt.Errorf("%w: a sequence has several new tokens or a tree, and the cache is sharded by context: each had one then, and no tree", ongpu.ErrNotReady)
)

// more returns why a schedule of kind k can't run a step that has more.
func (k stepKind) more() error {
	if k == ofOne {
		return errOneToken
	}
	return errWithoutTrees
}

// capacity returns the capacity of a plan for a step of rows rows.
func capacity(rows, pages int) attention.Capacity {
	return attention.Capacity{Sequences: rows, Rows: rows, Pages: pages}
}

// Keep makes s a Schedule.
func (s *deviceSchedule) Keep() {
	s.recorded = true
	_ = s.each(func(p *planPart) error { p.plan.Recorded(); return nil })
}

// Unfit makes s a Schedule.
func (s *deviceSchedule) Unfit() error {
	if s.planned {
		return nil
	}
	return s.does.more()
}

// Generation is the sum of the generations of all plans. No generation ever falls.
func (s *deviceSchedule) Generation() (sum uint64) {
	_ = s.each(func(p *planPart) error { sum += p.plan.Generation(); return nil })
	return sum
}

func (d *DevicePages) NewPlan(rows int, g attn.Problem) Plan {
	p := &DevicePlan{pages: d, most: rows, geometry: g}
	for does := ofOne; does <= ofTrees; does++ {
		if does == ofOne && d.shards == 1 {
			continue // ofChunks serves one token, too
		}
		s := &deviceSchedule{does: does}
		g.Tree = does == ofTrees
		for _, part := range d.Parts {
			s.parts = append(s.parts, planPart{geometry: part.problem(&g)})
		}
		if d.shards > 1 {
			s.context = s.newStates(d.shards, rows, &g)
		}
		p.schedules = append(p.schedules, s)
	}
	return p
}

// DevicePlan is a Plan for one GPU or several.
//
// The launches of a step depend on whether the step has one token for each sequence, several tokens, or trees. So a plan has a
// schedule for each kind. A recording holds one of the schedules, and a step with trees leaves a recorded schedule without trees
// unchanged.
type DevicePlan struct {
	pages     *DevicePages
	most      int // rows of a step
	geometry  attn.Problem
	schedules []*deviceSchedule // each can run the steps of those before it
	now       *deviceSchedule   // the schedule that layers run
	rows      int               // of the last build
	perMember bool              // each member has only the rows of its heads
	merging   bool              // each member merges states: Build prepares schedules by context for that
}

// stepKind is the kind of a step.
type stepKind uint8

const (
	ofOne    stepKind = iota // each sequence has one new token
	ofChunks                 // sequences have several new tokens
	ofTrees                  // sequences have trees
)

func kindOf(seqs []attn.Sequence) stepKind {
	switch {
	case attn.HasTrees(seqs):
		return ofTrees
	case slices.ContainsFunc(seqs, func(s attn.Sequence) bool { return s.Queries > 1 }):
		return ofChunks
	}
	return ofOne
}

// deviceSchedule is a schedule for all members.
type deviceSchedule struct {
	does     stepKind
	parts    []planPart
	context  *contextStates   // of the first member; nil: the cache is not sharded by context
	others   []*contextStates // of the other members, if each member merges; nil: not needed so far
	planned  bool             // whether the last Build planned the schedule
	recorded bool             // whether every Build has to plan the schedule
}

// planPart is the part of a schedule that one member runs.
type planPart struct {
	geometry attn.Problem
	plan     ongpu.AttentionPlan // nil before the first build

	seqs  []attn.Sequence // scratch of Build: the sequences with the member's keys
	pages []int32         // of seqs
	slots []int           // of the new tokens of rows
	at    []int           // positions of the queries of seqs, for rotary embeddings
}

func (p *DevicePlan) Build(op string, seqs []attn.Sequence, rows int) error {
	lead := p.pages.GPU
	if err := lead.Enter(op); err != nil {
		return err
	}
	defer lead.Group.Leave()
	if lead.Group.Recording() { // replays would upload the plan of this step
		return ongpu.WithinRecord(op, lead)
	}
	has := kindOf(seqs)
	p.now, p.rows = nil, rows
	for _, s := range p.schedules {
		s.planned = false
		if s.does < has || p.now != nil && !s.recorded {
			continue
		}
		if p.now == nil {
			p.now = s
		}
		if err := p.plan(op, s, seqs, rows); err != nil {
			return err
		}
		s.planned = true
	}
	return nil
}

// plan builds schedule s.
func (p *DevicePlan) plan(op string, s *deviceSchedule, seqs []attn.Sequence, rows int) error {
	lead := p.pages.GPU
	for i := range s.parts {
		part, of, mine := &s.parts[i], p.pages.Parts[i], seqs
		if s.context != nil {
			mine = part.of(of.shard, p.geometry.PageTokens, seqs, rows, s.context.fresh == nil)
		} else if part.slots = nil; slices.ContainsFunc(seqs, func(q attn.Sequence) bool { return q.QueryOnly }) {
			part.slots = of.shard.AppendSlots(make([]int, 0, rows), seqs, rows, p.geometry.PageTokens)
		}
		// With this capacity the form of the launches does not depend on lengths, so a recording stays valid.
		if err := p.planPart(op, lead.Members[i], part, mine, rows, capacity(rows, of.pages)); err != nil {
			return err
		}
	}
	if s.context != nil {
		if err := p.planContext(op, s.context, seqs, rows); err != nil {
			return err
		}
		if p.merging || s.others != nil {
			if err := p.planOthers(op, s); err != nil {
				return err
			}
		}
	}
	return p.upload(op, s)
}

// upload copies the plans to the members.
func (p *DevicePlan) upload(op string, s *deviceSchedule) error {
	lead := p.pages.GPU
	err := lead.Queue.Submit(func(sub *queue.Submission) error {
		return sub.Do(func(stream *cuda.Stream) error {
			return s.each(func(p *planPart) error { return p.plan.Upload(stream) })
		})
	})
	if err != nil {
		return ongpu.EngineError(op, "plan", err)
	}
	return nil
}

func (p *DevicePlan) planPart(op string, gpu *ongpu.GPU, part *planPart, seqs []attn.Sequence, rows int, c attention.Capacity) error {
	if part.plan == nil {
		part.plan = gpu.TakePlan()
		// A step has no Close: a cleanup returns the plans.
		runtime.AddCleanup(p, gpu.GivePlan, part.plan)
		if err := part.plan.Reserve(c); err != nil {
			return ongpu.EngineError(op, "plan", err)
		}
	}
	return gpu.BuildPlan(op, part.plan, part.geometry, seqs, rows, part.slots)
}

// each visits all plans: those of the members, then those for new tokens.
func (s *deviceSchedule) each(visit func(*planPart) error) error {
	for i := range s.parts {
		if err := visit(&s.parts[i]); err != nil {
			return err
		}
	}
	if s.context == nil || s.context.fresh == nil {
		return nil
	}
	for i := range len(s.others) + 1 {
		if err := visit(s.states(i).fresh); err != nil {
			return err
		}
	}
	return nil
}

// states returns the states of a member.
func (s *deviceSchedule) states(member int) *contextStates {
	if member == 0 {
		return s.context
	}
	return s.others[member-1]
}

// contextStates is memory for partial states of attention, of a cache that is sharded by context. If the first member merges, its memory
// receives the states of all members. If each member merges, each has memory for its own states.
type contextStates struct {
	parts      attention.Parts
	fresh      *planPart       // attention of new tokens among themselves; nil: the new tokens are among the members' keys
	memory     *queue.Memory   // of the states, and of the keys and values of new tokens; nil before the first Build
	pages      attention.Pages // of new tokens, without the buffer
	generation uint64          // of memory
	size       int64           // of memory
}

// newStates returns memory for the states of parts parts, in steps of rows rows.
func (s *deviceSchedule) newStates(parts, rows int, g *attn.Problem) *contextStates {
	c := &contextStates{parts: attention.Parts{Count: parts, Rows: rows, Heads: g.Heads, Dim: g.ValueDim}}
	if s.does == ofOne {
		c.size = c.parts.Bytes()
		return c
	}
	c.parts.Count++
	c.size = c.parts.Bytes()
	c.fresh = &planPart{geometry: g.OfNew(rows)}
	// A sequence may begin at any row, and reach over as many rows.
	n := attn.Product(g.KVHeads+1, rows)
	for s := range g.Pages.Slabs {
		const align = 256
		m := ongpu.Mem{Offset: (c.size + align - 1) / align * align, DType: s.DType, Len: attn.Product(n, s.Row)}
		*c.pages.At(s), c.size = m, m.Offset+m.Size()
	}
	return c
}

// of returns the sequences of a step with the keys that a shard has: all keys, or the keys before the new tokens. It sets p.slots to
// the slots of new tokens in the shard.
func (p *planPart) of(shard attn.ContextShard, pageTokens int, seqs []attn.Sequence, rows int, all bool) []attn.Sequence {
	p.seqs, p.pages, p.at = p.seqs[:0], p.pages[:0], p.at[:0]
	p.slots = shard.AppendSlots(p.slots[:0], seqs, rows, pageTokens)
	for i, q := range seqs {
		keys := q.Keys
		if !all {
			keys -= q.Queries
		}
		first := len(p.pages)
		p.pages, q.Keys = shard.AppendKeys(p.pages, q.Pages, keys, pageTokens)
		p.position(&q, &seqs[i])
		q.Pages, q.Tree = p.pages[first:], nil
		p.seqs = append(p.seqs, q)
	}
	return p.seqs
}

// position sets the positions of q's queries, if queries are rotated. q has other keys than the whole sequence, which gives the positions.
func (p *planPart) position(q, whole *attn.Sequence) {
	if p.geometry.Rotary == (attn.Rotary{}) {
		return
	}
	first := len(p.at)
	for i := range whole.Queries {
		p.at = append(p.at, whole.Position(i))
	}
	q.Positions = p.at[first:]
}

// planContext plans the work of the first member: new tokens among themselves.
func (p *DevicePlan) planContext(op string, c *contextStates, seqs []attn.Sequence, rows int) error {
	lead := p.pages.GPU
	if err := takeStates(lead, op, c); err != nil {
		return err
	}
	part := c.fresh
	if part == nil {
		return nil
	}
	part.seqs, part.pages, part.at = part.seqs[:0], part.pages[:0], part.at[:0]
	for i, q := range seqs {
		part.pages = append(part.pages, int32(q.Row))
		part.position(&q, &seqs[i])
		q.Keys, q.Pages = q.Queries, part.pages[len(part.pages)-1:]
		part.seqs = append(part.seqs, q)
	}
	return p.planPart(op, lead, part, part.seqs, rows, capacity(rows, rows))
}

// planOthers is planContext for the other members, after planContext of the same rows. Each member merges.
func (p *DevicePlan) planOthers(op string, s *deviceSchedule) error {
	others := s.others
	if others == nil {
		g := p.geometry
		g.Tree = s.does == ofTrees
		for range p.pages.GPU.Members[1:] {
			others = append(others, s.newStates(1, p.most, &g))
		}
	}
	for i, m := range p.pages.GPU.Members[1:] {
		c := others[i]
		if err := takeStates(m, op, c); err != nil {
			return err
		}
		if c.fresh == nil {
			continue
		}
		if err := p.planPart(op, m, c.fresh, s.context.fresh.seqs, p.rows, capacity(p.rows, p.rows)); err != nil {
			return err
		}
	}
	s.others = others
	return nil
}

// takeStates allocates the memory, unless there is some, and uploads the table at its beginning. The caller has entered the GPU.
func takeStates(g *ongpu.GPU, op string, c *contextStates) error {
	if c.memory != nil {
		return nil
	}
	if err := newStates(g, c); err != nil {
		return ongpu.EngineError(op, "plan", fmt.Errorf("on %s: states: %w", g.Alone(), err))
	}
	return nil
}

func newStates(g *ongpu.GPU, c *contextStates) error {
	table := c.parts.Table()
	pinned, err := g.Queue.TakePinned(len(table))
	if err != nil {
		return err
	}
	defer g.Queue.GivePinned(pinned)
	copy(pinned.Bytes, table)
	return g.Queue.Submit(func(sub *queue.Submission) error {
		m, err := sub.Alloc(c.size)
		if err != nil {
			return err
		}
		generation := sub.Generation(m)
		b, err := sub.Use(m, generation)
		if err == nil {
			err = sub.Upload(b, 0, pinned, 0, len(table))
		}
		if err == nil {
			err = sub.Mark(pinned)
		}
		if err != nil {
			return errors.Join(err, sub.Free(m))
		}
		c.memory, c.generation = m, generation
		return nil
	})
}

// Plans returns the plans of the schedule that layers run: those of the members, then those for new tokens.
func (p *DevicePlan) Plans() (all []ongpu.AttentionPlan) {
	_ = p.now.each(func(part *planPart) error {
		all = append(all, part.plan)
		return nil
	})
	return all
}

// Of reports whether the plan is for layers of d.
func (p *DevicePlan) Of(d *DevicePages) bool { return p.pages == d }
