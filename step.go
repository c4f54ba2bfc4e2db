package leanattention

import (
	"errors"
	"iter"
	"math"
	"slices"
	"sync"
	"time"

	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/pages"
)

// Step connects a graph with a cache. It has a fixed number of token rows, which each step assigns to sequences. A graph has
// one Step for all of its [CachedAttention] nodes, one node a layer:
//
//	step, err := cache.NewStep(rows) // once, before the graph is built
//	for {
//		err = step.Run([]leanattention.Append{{Seq: s, Tokens: 1}, ...}, func() error {
//			defer machine.Reset()
//			return leanattention.Cause(machine.RunAll())
//		})
//	}
//
// [Step.Run] sets the step, runs the graph, and commits, or rolls back after an error. A caller that needs more control calls
// [Step.Set], [Step.Commit] and [Step.Rollback].
//
// The tokens of a step are visible to other calls after Commit. After Rollback the cache is as before Set.
//
// A Step must not be copied: a copy is [ErrState] wherever it is used.
type Step struct {
	mark   nocopy.Mark
	cache  *Cache
	id     uint64
	tokens int

	// mu is held while a layer computes, so that the step can't change under
	// it; it is taken before the cache's mu.
	mu           sync.Mutex
	open         bool
	managed      bool     // Run has set the step, and alone commits it or rolls it back
	given        bool     // sequences are those of the last Set
	turn         uint64   // counts the Sets
	began        bool     // a layer has begun to run since Set
	run          uint64   // counts the runs of the graph: Set begins one, and so does a node that runs again
	ran          []uint64 // of each layer the run that it was last completed in
	reservations []reservation
	sequences    []attn.Sequence
	trees        []uint64       // of the sequences
	positions    []int          // of the sequences that were given some
	copies       []kvstore.Copy // that Set needs
	plans        []*stepPlan
	calls        int           // CachedAttention nodes made
	layers       int64         // runs of CachedAttention nodes
	time         time.Duration // in them
}

// reservation is the pages that an open step holds for a sequence.
type reservation struct {
	pages.Reservation
	seq    *Sequence
	tokens int // 0: its row is a query alone, and there is no reservation
}

// Need returns the number of free pages that a step of these appends takes, whatever the step's number of rows. It changes
// nothing. Set of the same appends is [ErrCacheFull] exactly if Need is above [CacheStats].FreePages. So a server can choose the
// sequences of a step before Set.
//
// Errors: [ErrLength] for appends that do not fit even if all other sequences are released. On a cache with a
// [CacheConfig].Window, such appends may fit in several steps ([Chunks]), because each Commit frees pages. Otherwise the errors of
// Set: [ErrState], [ErrLength], [ErrClosed].
func (c *Cache) Need(appends []Append) (pages int, err error) {
	const op = "Need"
	if err := c.made(op); err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, errs.Errorf(op, ErrClosed, "cache")
	}
	if pages, err = c.need(op, appends, math.MaxInt); err == nil {
		err = c.never(op, appends)
	}
	if err != nil {
		return 0, err
	}
	return pages, nil
}

// NewStep returns a step of tokens token rows, 1 <= tokens <= 2^24. Errors: [ErrLength], [ErrClosed].
func (c *Cache) NewStep(tokens int) (*Step, error) {
	if err := c.made("NewStep"); err != nil {
		return nil, err
	}
	if tokens < 1 || tokens > 1<<24 {
		return nil, errs.Errorf("NewStep", ErrLength, "%d tokens, outside [1, %d]", tokens, 1<<24)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errs.Errorf("NewStep", ErrClosed, "cache")
	}
	s := &Step{cache: c, id: ids.Add(1), tokens: tokens, ran: make([]uint64, c.config.Layers)}
	s.mark.Set()
	return s, nil
}

// made returns an error unless s is from NewStep, and not a copy.
func (s *Step) made(op string) error {
	const what, by = "step", "NewStep"
	if s == nil {
		return errs.Unmade(op, what, by)
	}
	return errs.Original(op, &s.mark, what, by)
}

// Tokens returns the number of token rows.
func (s *Step) Tokens() int {
	if s.made("") != nil {
		return 0
	}
	return s.tokens
}

// Positions returns the position of each row in its sequence, counted from 0, for rotary embeddings and tables of positions:
//
//   - row j of a sequence that had L tokens: L+j
//   - with a tree: L plus the number of other new tokens that the row sees, so tokens with one parent have one position
//   - with [Append.Positions]: that position
//   - an unassigned row: 0
//
// The positions are those of the last [Step.Set], also after Commit. Positions returns nil before the first Set, after Rollback,
// and after a Set that failed.
func (s *Step) Positions() []int {
	if s.made("") != nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.given {
		return nil
	}
	positions := make([]int, s.tokens)
	for _, seq := range s.sequences {
		for j := range seq.Queries {
			positions[seq.Row+j] = seq.Position(j)
		}
	}
	return positions
}

// Last returns the last row of each append of the last [Step.Set], in order. Without a tree, that row has the logits of the
// sequence's next token. The result is valid as long as that of [Step.Positions].
func (s *Step) Last() []int {
	if s.made("") != nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.given {
		return nil
	}
	last := make([]int, len(s.sequences))
	for i, seq := range s.sequences {
		last[i] = seq.Row + seq.Queries - 1
	}
	return last
}

// AttentionTime returns the time that runs of the step's [CachedAttention] nodes have taken since NewStep, including appends. For
// tensors on a GPU, that is the time to queue the work.
func (s *Step) AttentionTime() time.Duration {
	if s.made("") != nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.time
}

// Set begins a step. The first Tokens rows of the graph belong to the first sequence, the next rows to the second, and so on.
// Chunks of prompts and single tokens of sequences that decode can be in one step. The outputs of unassigned rows are 0.
//
// Set reserves the slots of the new tokens, and plans the schedule for all layers.
//
// Errors, after which nothing has changed:
//
//   - [ErrCacheFull]: too few free pages
//   - [ErrLength]: more tokens than the step has rows, or than all pages of the cache hold; a position out of range
//   - [ErrState]: a sequence is in the step twice, or in another open step; this step is open
//   - [ErrShape]: a malformed tree, or a number of positions other than Tokens
//   - [ErrUnsupported]: a tree that a layer does not support
func (s *Step) Set(appends []Append) error {
	const op = "Set"
	if err := s.made(op); err != nil {
		return err
	}
	return s.set(op, appends, false)
}

func (s *Step) set(op string, appends []Append, managed bool) (err error) {
	defer errs.RecoverTo(op, &err)
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := s.check(op, appends); err != nil {
		s.given = s.given && s.open // of an open step nothing has changed
		return err
	}

	if err := s.begin(op, appends); err != nil {
		return errors.Join(err, s.rollback(op))
	}
	s.managed = managed
	return nil
}

// begin is Set for checked appends. The caller holds both mu.
func (s *Step) begin(op string, appends []Append) (err error) {
	defer errs.RecoverTo(op, &err) // so that Set rolls back
	c := s.cache
	s.reservations, s.sequences, s.copies, s.trees, s.positions = s.reservations[:0], s.sequences[:0], s.copies[:0], s.trees[:0], s.positions[:0]
	s.open, s.given = true, true
	c.open[s] = true
	s.began = false
	s.turn++
	s.run++
	row := 0
	for _, a := range appends {
		r := s.nextReservation(a)
		if a.QueryOnly {
			r.tokens = 0
			r.Pages = append(r.Pages[:0], a.Seq.table.Pages...)
		} else if err := c.pool.Reserve(&r.Reservation, &a.Seq.table, a.Tokens); err != nil {
			return pagesError(op, err)
		}
		a.Seq.step = s
		if to, from, ok := r.Copy(); ok {
			s.copies = append(s.copies, kvstore.Copy{To: to, From: from})
		}
		// Engines see a sequence without the pages that were given back, as if it began with the first that is there: which
		// keys a query sees depends on their distance alone.
		gone := c.pool.Shift(&a.Seq.table)
		seq := attn.Sequence{Row: row, Queries: a.Tokens, Keys: a.Seq.table.Tokens - gone + r.tokens, Pages: r.Pages, Before: gone, QueryOnly: a.QueryOnly}
		if a.Parents != nil {
			at := len(s.trees)
			s.trees = attn.AppendTree(s.trees, a.Parents)
			seq.Tree = s.trees[at:]
		}
		if a.Positions != nil {
			at := len(s.positions)
			s.positions = append(s.positions, a.Positions...)
			seq.Positions = s.positions[at:]
		}
		s.sequences = append(s.sequences, seq)
		row += a.Tokens
	}
	if err := c.store.CopyPages(op, s.copies); err != nil {
		return err
	}
	for _, p := range s.plans {
		rows := s.tokens
		if p.used { // as the next run will
			rows = max(1, s.used())
		}
		if err := s.plan(op, p, rows); err != nil {
			return err
		}
	}
	return nil
}

// check returns the error of Set for invalid appends. The caller holds both mu.
func (s *Step) check(op string, appends []Append) error {
	c := s.cache
	switch {
	case c.closed:
		return errs.Errorf(op, ErrClosed, "cache")
	case s.managed:
		return errs.Errorf(op, ErrState, "step is open: a call of Run has not returned")
	case s.open:
		return errs.Errorf(op, ErrState, "step is open: commit or roll back first")
	}
	need, err := c.need(op, appends, s.tokens)
	if err != nil {
		return err
	}
	for i, a := range appends {
		if err := checkPositions(op, i, &a); err != nil {
			return err
		}
		if a.QueryOnly {
			if err := s.checkQuery(op, i, &a); err != nil {
				return err
			}
		}
		if a.Parents == nil {
			continue
		}
		if c.config.scales() == attn.ScalesByPage {
			return errs.Errorf(op, ErrUnsupported, "append %d has Parents, on a cache with ScalesByPage: tokens of a tree move, and pages have different scales", i)
		}
		if err := attn.CheckParents(a.Parents, a.Tokens); err != nil {
			return errs.Errorf(op, ErrShape, "append %d: %v", i, err)
		}
		for _, p := range s.plans {
			if err := s.treeFits(op, p); err != nil {
				return err
			}
		}
	}
	free := c.pool.Free()
	if need <= free {
		return nil
	}
	if err := c.never(op, appends); err != nil {
		return err
	}
	return errs.Errorf(op, ErrCacheFull, "%d pages of %d tokens needed, %d of %d free", need, c.config.PageSize, free, c.config.Pages)
}

// need returns the number of free pages that appends of at most rows rows take. The caller holds mu.
func (c *Cache) need(op string, appends []Append, rows int) (need int, err error) {
	c.checks++
	all := rows
	for i, a := range appends {
		if a.Seq == nil {
			return 0, errs.Errorf(op, ErrState, "append %d has no sequence", i)
		}
		if problem := a.Seq.mark.Problem("sequence", makesSequences); problem != "" {
			return 0, errs.Errorf(op, ErrState, "append %d: %s", i, problem)
		}
		if a.Seq.cache != c {
			return 0, errs.Errorf(op, ErrState, "append %d has a sequence of another cache", i)
		}
		if err := a.Seq.usable(op); err != nil {
			return 0, err
		}
		if a.Seq.seen == c.checks {
			return 0, errs.Errorf(op, ErrState, "appends %d and %d have the same sequence", a.Seq.seenAt, i)
		}
		a.Seq.seen, a.Seq.seenAt = c.checks, i
		if a.Tokens < 1 {
			return 0, errs.Errorf(op, ErrLength, "append %d has %d tokens: an append has one at least, a sequence without new tokens is left out", i, a.Tokens)
		}
		if a.Tokens > rows {
			return 0, errs.Errorf(op, ErrLength, "append %d has %d tokens, outside [1, %d]: %d of the step's %d rows are left", i, a.Tokens, rows, rows, all)
		}
		if have := a.Seq.table.Tokens; a.Tokens > math.MaxInt-have {
			return 0, errs.Errorf(op, ErrLength, "append %d has %d tokens behind %d: an int does not count them", i, a.Tokens, have)
		}
		rows -= a.Tokens
		if !a.QueryOnly {
			need += c.pool.Need(&a.Seq.table, a.Tokens)
		}
	}
	return need, nil
}

// never returns an error if appends do not fit even in an otherwise empty cache. The caller holds mu.
func (c *Cache) never(op string, appends []Append) error {
	var tables []*pages.Table
	var tokens []int
	for _, a := range appends {
		if !a.QueryOnly {
			tables, tokens = append(tables, &a.Seq.table), append(tokens, a.Tokens)
		}
	}
	if least := c.pool.Least(tables, tokens); least > c.config.Pages {
		return errs.Errorf(op, ErrLength, "the sequences would have %d pages of %d tokens: the cache has %d in all, so it never has room for these appends: append fewer tokens, or make a cache of more Pages",
			least, c.config.PageSize, c.config.Pages)
	}
	return nil
}

// nextReservation returns a reservation for the next append. It reuses memory of earlier steps.
func (s *Step) nextReservation(a Append) *reservation {
	if n := len(s.reservations); n < cap(s.reservations) {
		s.reservations = s.reservations[:n+1]
	} else {
		s.reservations = append(s.reservations, reservation{})
	}
	r := &s.reservations[len(s.reservations)-1]
	r.seq, r.tokens = a.Seq, a.Tokens
	return r
}

// Commit makes the step's tokens part of their sequences, and frees the pages that no window reaches ([CacheConfig].Window).
//
// Every layer of the cache must have run since Set, and the last run must have completed. Otherwise Commit is [ErrState], and
// the step stays open: after a partial run, layers may hold the tokens of different runs. If no layer has run since Set, the
// program may lack a call of the machine's Reset.
func (s *Step) Commit() error {
	const op = "Commit"
	if err := s.made(op); err != nil {
		return err
	}
	return s.commit(op, false)
}

func (s *Step) commit(op string, managed bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return errs.Errorf(op, ErrClosed, "cache")
	case !s.open:
		return errs.Errorf(op, ErrState, "step is not open: call Set first")
	case s.managed && !managed:
		return errs.Errorf(op, ErrState, "Run has set the step, and commits it when its function returns nil")
	}
	if len(s.sequences) > 0 {
		if !s.began && s.layers > 0 {
			return errs.Errorf(op, ErrState, "no layer has run since Set: a machine that has run does nothing more, and reports no error, until machine.Reset")
		}
		for i, run := range s.ran {
			if run != s.run {
				return errs.Errorf(op, ErrState, "layer %d has not run since Set, or not since the graph began to run again", i)
			}
		}
	}
	for i := range s.reservations {
		r := &s.reservations[i]
		if err := c.commit(op, r); err != nil {
			return err
		}
	}
	s.open, s.managed = false, false
	delete(c.open, s)
	return nil
}

// Rollback frees the reservations of Set, so that every sequence is as before. It does nothing on a step that is not open,
// so that it can be deferred.
func (s *Step) Rollback() error {
	const op = "Rollback"
	if err := s.made(op); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	switch {
	case s.cache.closed:
		return errs.Errorf(op, ErrClosed, "cache")
	case s.managed:
		return errs.Errorf(op, ErrState, "Run has set the step, and rolls it back when its function returns an error")
	case s.open:
		return s.rollback(op)
	}
	return nil
}

// Run does a whole step: it calls Set, f and Commit, in this order. f fills the inputs and runs the
// graph, or replays a recording:
//
//	err := step.Run(appends, func() error {
//		copy(ids, tokens) // ids is the memory of an input
//		defer machine.Reset()
//		return leanattention.Cause(machine.RunAll())
//	})
//
// The contract:
//
//   - If Set fails, Run returns the error of Set and does not call f.
//   - If f returns an error, panics or calls [runtime.Goexit], or if Commit fails, Run rolls the step back: the
//     cache is as it was before Run.
//   - Run returns the error of f unchanged, so errors.Is finds what f wrapped. f or the caller calls [Cause]; Run does not.
//   - Run recovers no panic: after the rollback a panic of f reaches the caller of Run, with its value and its stack.
//   - While f runs, Set, Commit, Rollback and Run of this step are [ErrState] and change nothing. The result of f alone
//     decides between Commit and Rollback.
//   - f may do all else that is allowed between Set and Commit, and may call Run of other steps for other sequences.
//   - If the cache is closed while f runs, later runs of layers are [ErrClosed], and so is Commit.
//
// Errors: those of Set, f and Commit; [ErrState] for a nil f.
func (s *Step) Run(appends []Append, f func() error) (err error) {
	const op = "Run"
	if err := s.made(op); err != nil {
		return err
	}
	if f == nil {
		return errs.Errorf(op, ErrState, "f is nil")
	}
	if err := s.set(op, appends, true); err != nil {
		return err
	}
	committed := false
	defer func() { // no recover: a panic keeps its stack, and Goexit passes here, too
		if committed {
			return
		}
		if undo := s.abandon(op); undo != nil {
			err = errors.Join(err, undo)
		}
	}()
	if err = f(); err == nil {
		err = s.commit(op, true)
		committed = err == nil
	}
	return err
}

// abandon is the rollback of Run. A closed cache needs no rollback.
func (s *Step) abandon(op string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	if s.cache.closed {
		return nil
	}
	return s.rollback(op)
}

// rollback is Rollback. The caller holds both mu. Reservations roll back in reverse order, which restores the order of the free list.
func (s *Step) rollback(op string) (err error) {
	for i := range slices.Backward(s.reservations) {
		r := &s.reservations[i]
		if r.seq.step != s { // it was not reserved
			continue
		}
		if r.tokens > 0 {
			if e := s.cache.pool.Rollback(&r.Reservation); e != nil {
				err = pagesError(op, e)
			}
		}
		r.seq.step = nil
	}
	s.open, s.given, s.managed = false, false, false
	delete(s.cache.open, s)
	return err
}

// plan builds p for the open step, with rows rows.
func (s *Step) plan(op string, p *stepPlan, rows int) error {
	p.turn = 0
	if attn.HasTrees(s.sequences) {
		if err := s.treeFits(op, p); err != nil { // of a node that was made after Set
			return err
		}
	}
	if slices.ContainsFunc(s.sequences, func(q attn.Sequence) bool { return q.QueryOnly }) {
		if err := p.queryFits(op); err != nil {
			return err
		}
	}
	if err := p.plan.Build(op, s.sequences, rows); err != nil {
		return err
	}
	p.turn, p.rows = s.turn, rows
	return nil
}

// used returns the number of rows that Set assigned.
func (s *Step) used() int {
	if len(s.sequences) == 0 {
		return 0
	}
	last := &s.sequences[len(s.sequences)-1]
	return last.Row + last.Queries
}

// Chunks cuts appends of any number of tokens, as long prompts are, into steps of at most
// rows tokens. Each step is a list for [Step.Run]. The second value has, for each append of
// the step, its index in appends:
//
//	for chunk, of := range leanattention.Chunks(step.Tokens(), todo) {
//		err := step.Run(chunk, func() error {
//			row := 0
//			for i, a := range chunk {
//				row += copy(ids[row:], prompts[of[i]][:a.Tokens])
//			}
//			...
//		})
//		for i, row := range step.Last() {
//			prompts[of[i]] = prompts[of[i]][chunk[i].Tokens:]
//			if len(prompts[of[i]]) == 0 {
//				// row has the logits of the next token of prompt of[i]
//			}
//		}
//	}
//
// The rules of cutting:
//
//   - An append with one token left is in the next step, so that a sequence that decodes does not wait for a prompt.
//   - The other appends get the other rows in order, each as many as it can use.
//   - The appends of a step are in the order of appends.
//   - An append with a tree is not cut: it waits for a step that takes all of it.
//   - An append of 0 tokens is in no step.
//
// Chunks copies appends when the loop begins. What no step can take is passed on as it is, and Set refuses it: a negative
// number of tokens, a number of Positions that differs from Tokens, and all appends if rows is less than 1.
func Chunks(rows int, appends []Append) iter.Seq2[[]Append, []int] {
	return func(yield func([]Append, []int) bool) {
		todo := slices.Clone(appends)
		done := make([]int, len(todo))
		for {
			chunk, of := nextChunk(rows, todo, done)
			if len(chunk) == 0 || !yield(chunk, of) {
				return
			}
		}
	}
}

// nextChunk returns one step of Chunks, and adds the tokens of each append to done.
func nextChunk(rows int, appends []Append, done []int) (chunk []Append, of []int) {
	taken := shareRows(rows, appends, done)
	for i, n := range taken {
		if n == 0 {
			continue
		}
		chunk = append(chunk, Append{Seq: appends[i].Seq, Tokens: n, Parents: appends[i].Parents, Positions: positionsOf(&appends[i], done[i], n), QueryOnly: appends[i].QueryOnly})
		of = append(of, i)
		done[i] += n
	}
	return chunk, of
}

// positioned reports whether Positions is nil or has a position for each token.
func (a *Append) positioned() bool { return a.Positions == nil || len(a.Positions) == a.Tokens }

// positionsOf returns the positions of n tokens of an append, from token from on; all positions of an append that Set refuses.
func positionsOf(a *Append, from, n int) []int {
	if a.Positions == nil || n < 0 || !a.positioned() {
		return a.Positions
	}
	return a.Positions[from : from+n]
}

// shareRows returns the number of tokens of each append in the next step.
func shareRows(rows int, appends []Append, done []int) []int {
	taken := make([]int, len(appends))
	all := rows
	for i, a := range appends {
		left := a.Tokens - done[i]
		uncut := all < 1 || left < 0 || a.Parents != nil && left > all || !a.positioned() // Set refuses it
		if uncut || left == 1 && rows > 0 || a.Parents != nil && left <= rows {
			taken[i] = left
			rows -= max(left, 0)
		}
	}
	for i, a := range appends {
		if left := a.Tokens - done[i]; left > 1 && a.Parents == nil && all > 0 && a.positioned() {
			taken[i] = min(left, max(rows, 0))
			rows -= taken[i]
		}
	}
	return taken
}
