package decoder

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	la "gorgonia.org/leanattention"
)

// scheduler decides which tokens of which texts a step computes. It is not safe for use by several goroutines at once.
//
// A text waits until the batch and the cache have capacity for its prompt. Then the text is live. A step computes the last chosen
// token of each live text, and fills its other rows with tokens of prompts. A text begins with a fork of the sequence that has the
// longest common beginning with its tokens, of a live text or of one that ended. When the cache is full, sequences of ended
// texts are released first. Then the youngest of the least urgent live texts waits again: its sequence is released, and its tokens are
// computed again later, or read from a file.
type scheduler struct {
	runner   runner
	vocab    int
	batch    int     // most live texts
	page     int     // tokens of a page
	most     int     // most tokens of a text that the cache has
	waiting  []*Text // the next one first
	live     []*Text // the most urgent first, and of these the oldest
	retained []prefix
	swap     *swap   // nil: none
	queued   *queued // steps whose tokens the host does not have yet; nil: none
	pace     pace
	now      func() time.Time
	taken    time.Time     // when the host had the tokens of the last queued steps
	together time.Duration // the most that steps that are queued together take, but for a single longer step; 0: no bound
	each     time.Duration // the time of one of the last queued steps; 0: none yet
	usual    usualTime
	sleep    func(time.Duration)
	joined   func() bool // reports whether texts want to join
	stats    *Stats
	choices  []choice // of a step
}

// queued is steps of one token of each live text. The sequences of the texts have the tokens of these steps already.
type queued struct {
	todo  []work
	steps int
	began time.Time
	wait  func() (chosen []int, err error)
}

// usualTime has the times of queued steps of one number of texts.
type usualTime struct {
	texts int
	step  time.Duration // of a step: about the least of the last steps
	queue time.Duration // in which the host queues a step
}

// runner computes steps.
type runner interface {
	rows(all bool) int // most rows of a step
	// run computes a step. draws is nil, or has a draw for each row of the logits. A runner without a GPU ignores draws.
	run(appends []la.Append, tokens []int, all, logits bool, draws []draw) (results, error)
	draws() bool    // tokens are chosen by draws
	mostAhead() int // most steps of a call of ahead; 0: ahead is not supported
	// ahead queues steps of one token of each text. If tokens is nil, the first step takes the tokens that the queued step before
	// chooses. draws is nil, or has a draw for each text of each step.
	ahead(appends []la.Append, tokens []int, steps int, draws []draw) (wait func() (chosen []int, err error), err error)
	newSequence() (*la.Sequence, error)
	readSequence(r io.Reader) (*la.Sequence, error)
	need(appends []la.Append) (pages int, err error)
	freePages() int
}

// prefix is a sequence of an ended text.
type prefix struct {
	tokens []int
	seq    *la.Sequence
	pinned bool // stays until the engine is closed
}

const (
	// fewestShared is the least number of tokens for which a text is forked, or waits until another text has read them: fewer
	// tokens are read as fast side by side.
	fewestShared = 16
	// mostRetained bounds the sequences that stay after the end of their texts, besides those that are pinned.
	mostRetained = 64

	holdSpare  = 200 * time.Microsecond // from the time at which the host queues more steps to the end of the queued ones
	holdGrowth = 50                     // usualTime.step grows by at most 1/holdGrowth a step
)

// add adds a text that waits, behind those that are as urgent.
func (s *scheduler) add(t *Text) { s.waiting = insert(s.waiting, t, t.priority+1) }

// insert inserts a text before those with a priority of at least before.
func insert(all []*Text, t *Text, before int) []*Text {
	i := slices.IndexFunc(all, func(x *Text) bool { return x.priority >= before })
	if i < 0 {
		i = len(all)
	}
	return slices.Insert(all, i, t)
}

// idle reports whether no text needs a step.
func (s *scheduler) idle() bool { return len(s.live)+len(s.waiting) == 0 && s.queued == nil }

// step ends texts that were cancelled, admits waiting ones, and computes one step. An error of the computation ends all texts.
func (s *scheduler) step() {
	if err := s.try(); err != nil {
		s.fail(err)
	}
}

// fail ends all texts with an error.
func (s *scheduler) fail(err error) {
	if s.queued != nil {
		_, _ = s.queued.wait() // all texts end with the first error
		s.queued = nil
	}
	for _, t := range slices.Concat(s.live, s.waiting) {
		t.end("", err)
	}
	s.sweep()
}

func (s *scheduler) try() error {
	if s.queued != nil {
		return s.collect()
	}
	s.cancel()
	if err := s.shift(); err != nil {
		return err
	}
	if err := s.admit(); err != nil {
		return err
	}
	todo, err := s.fit()
	if err != nil || len(todo) == 0 {
		return err
	}
	guesses := s.draft()
	defer s.sweep()
	if guesses > 0 {
		return s.verify()
	}
	if steps := s.stepsAhead(todo); steps > 0 {
		_, tokens, _ := operands(todo)
		s.queued, err = s.queue(todo, tokens, steps)
		return err
	}
	return s.compute(todo)
}

// cancel ends the texts whose context is done.
func (s *scheduler) cancel() {
	for _, t := range slices.Concat(s.live, s.waiting) {
		switch err := t.ctx.Err(); {
		case errors.Is(err, context.DeadlineExceeded):
			t.end(Late, nil)
		case err != nil:
			t.end(Cancelled, nil)
		}
	}
	s.sweep()
}

// sweep removes the texts that have ended. Their sequences are kept for later texts with the same beginning.
func (s *scheduler) sweep() {
	s.waiting = slices.DeleteFunc(s.waiting, func(t *Text) bool {
		if t.ended {
			s.swap.drop(t)
		}
		return t.ended
	})
	s.live = slices.DeleteFunc(s.live, func(t *Text) bool {
		if !t.ended {
			return false
		}
		// A text that ended in one of several queued steps drops the tokens of the later ones. After an error the last token of a
		// text may be of no step.
		read := t.read()
		if t.err != nil {
			read = min(read, len(t.tokens)-1)
		}
		if err := t.seq.Truncate(read); err != nil {
			_ = t.seq.Release()
		} else {
			s.retain(prefix{t.tokens[:read], t.seq, t.pin && t.reason == Length})
		}
		t.seq = nil
		return true
	})
}

// read returns the number of tokens of a live text that its sequence has. The sequence may have tokens of queued steps, too.
func (t *Text) read() int { return min(t.seq.Len(), len(t.tokens)) }

// retain keeps a sequence. Of two sequences of which one begins with the other, only the longer one is kept, unless the other is pinned.
func (s *scheduler) retain(p prefix) {
	if len(p.tokens) < fewestShared {
		_ = p.seq.Release()
		return
	}
	for i := 0; i < len(s.retained); i++ {
		old := s.retained[i]
		n := common(old.tokens, p.tokens)
		switch {
		case n == len(p.tokens) && (old.pinned || !p.pinned):
			_ = p.seq.Release()
			s.retained = append(slices.Delete(s.retained, i, i+1), old)
			return
		case n == len(old.tokens) && (p.pinned || !old.pinned):
			s.evict(i)
			i--
		}
	}
	s.retained = append(s.retained, p)
	kept := 0
	for _, p := range s.retained {
		if !p.pinned {
			kept++
		}
	}
	if kept > mostRetained {
		s.evictOldest(nil)
	}
}

// evict releases a retained sequence.
func (s *scheduler) evict(i int) {
	_ = s.retained[i].seq.Release()
	s.retained = slices.Delete(s.retained, i, i+1)
}

// evictOldest releases the retained sequence whose last use is longest ago, of those that are not pinned, except one. It reports whether
// there is one.
func (s *scheduler) evictOldest(except *la.Sequence) bool {
	i := slices.IndexFunc(s.retained, func(p prefix) bool { return !p.pinned && p.seq != except })
	if i >= 0 {
		s.evict(i)
	}
	return i >= 0
}

// common returns the number of equal tokens at the beginning of two texts.
func common(a, b []int) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// admit makes waiting texts live, in order.
func (s *scheduler) admit() error {
	for len(s.waiting) > 0 && len(s.live) < s.batch {
		t := s.waiting[0]
		from, shared, soon := s.beginning(t)
		own := shared // tokens whose pages others have
		file := t.swapped != nil && t.swapped.tokens > shared
		if file {
			from, own, soon = nil, 0, false
		}
		if soon {
			return nil // a live text reads the same tokens now
		}
		// One page more than the tokens take, so that a text that had to wait does not have to wait again at once.
		pages := min(len(t.tokens)-own, s.most)/s.page + 2
		if (len(s.live) > 0 || file) && !s.makeFree(pages, from) && len(s.live) > 0 {
			if !s.takesFrom(t, pages) {
				return nil
			}
			if err := s.wait(); err != nil {
				return err
			}
			continue
		}
		if err := s.begin(t, from, shared); err != nil {
			return err
		}
		s.waiting = s.waiting[1:]
		s.live = insert(s.live, t, t.priority+1)
	}
	return nil
}

// begin gives a text its sequence: from its file, or a fork of the first tokens of a sequence; nil: neither.
func (s *scheduler) begin(t *Text, from *la.Sequence, shared int) (err error) {
	defer s.swap.drop(t)
	if t.swapped != nil && from == nil {
		if t.seq = s.swap.read(t, s.runner.readSequence); t.seq != nil {
			s.stats.Resumed++
			return nil
		}
	}
	if from == nil {
		t.seq, err = s.runner.newSequence()
		return err
	}
	if t.seq, err = from.Fork(); err != nil {
		return err
	}
	if err := t.seq.Truncate(shared); err != nil {
		err = errors.Join(err, t.seq.Release())
		t.seq = nil
		return err
	}
	t.mu.Lock()
	t.shared = max(t.shared, shared)
	t.mu.Unlock()
	s.stats.SharedTokens += shared
	return nil
}

// takesFrom reports whether a text that waits takes pages of live texts that are less urgent, and whether that is enough.
func (s *scheduler) takesFrom(t *Text, pages int) bool {
	free := s.runner.freePages()
	for _, x := range s.live {
		if x.priority > t.priority {
			free += (x.seq.Len() + s.page - 1) / s.page
		}
	}
	return s.live[len(s.live)-1].priority > t.priority && free >= pages
}

// wait makes the last live text wait again, before those that are as urgent.
func (s *scheduler) wait() error {
	last := len(s.live) - 1
	t := s.live[last]
	s.swap.write(t)
	if err := t.seq.Release(); err != nil {
		return err
	}
	t.seq = nil
	s.live = s.live[:last]
	s.waiting = insert(s.waiting, t, t.priority)
	s.stats.Preempted++
	return nil
}

// makeFree evicts sequences of ended texts, except one, until the cache has n free pages. It reports whether the cache has them.
func (s *scheduler) makeFree(n int, except *la.Sequence) bool {
	for n > s.runner.freePages() {
		if !s.evictOldest(except) {
			return false
		}
	}
	return true
}

// beginning returns the sequence that has the longest common beginning with a text, and the number of its tokens. One token
// is always left to read: its logits are wanted. soon reports that a live text is about to read more of the same tokens.
func (s *scheduler) beginning(t *Text) (from *la.Sequence, shared int, soon bool) {
	shared = fewestShared - 1
	most := len(t.tokens) - 1
	later := 0
	for _, other := range s.live {
		n := min(common(t.tokens, other.tokens), most)
		if n > other.seq.Len() {
			later = max(later, n)
		}
		if n = min(n, other.seq.Len()); n > shared && begins(other.seq, n) {
			from, shared = other.seq, n
		}
	}
	used := -1
	for i, p := range s.retained {
		if n := min(common(t.tokens, p.tokens), most); n > shared && begins(p.seq, n) {
			from, shared, used = p.seq, n, i
		}
	}
	if used >= 0 { // the sequence is evicted last
		p := s.retained[used]
		s.retained = append(slices.Delete(s.retained, used, used+1), p)
	}
	if from == nil {
		shared = 0
	}
	return from, shared, later >= fewestShared && later > shared
}

// begins reports whether a text may begin with the first n tokens of a sequence: the cache may have the last tokens of the
// sequence alone.
func begins(s *la.Sequence, n int) bool { return s.Len()-n <= s.Rewind() }

// work is the tokens of a live text that a step computes.
type work struct {
	text   *Text
	tokens int
}

// fit returns the work of the next step. The cache has pages for all of it.
func (s *scheduler) fit() ([]work, error) {
	for len(s.live) > 0 {
		var all []la.Append
		singles := 0
		for _, t := range s.live {
			n := len(t.tokens) - t.seq.Len()
			if all = append(all, la.Append{Seq: t.seq, Tokens: n}); n == 1 {
				singles++
			}
		}
		for chunk, of := range la.Chunks(singles+s.pace.rows(singles, s.runner.rows(false)), all) {
			need, err := s.runner.need(chunk)
			if err != nil && (len(s.live) == 1 || !errors.Is(err, la.ErrLength)) {
				return nil, err
			}
			if err != nil || need > s.runner.freePages() {
				break
			}
			var todo []work
			for i, a := range chunk {
				todo = append(todo, work{s.live[of[i]], a.Tokens})
			}
			return todo, nil
		}
		switch last := len(s.live) - 1; {
		case s.evictOldest(nil):
		case last == 0:
			return nil, fmt.Errorf("decoder: %d tokens of one text: %w", len(s.live[0].tokens), la.ErrCacheFull)
		default:
			if err := s.wait(); err != nil {
				return nil, err
			}
		}
	}
	return nil, nil
}

// compute computes a step, and continues each text whose tokens have all been read.
func (s *scheduler) compute(todo []work) error {
	appends, tokens, logits := operands(todo)
	began := s.now()
	r, err := s.runner.run(appends, tokens, false, logits, s.draws(todo))
	if err != nil {
		return err
	}
	singles := 0
	for _, w := range todo {
		if w.tokens == 1 {
			singles++
		}
	}
	s.pace.took(singles, len(tokens)-singles, s.now().Sub(began))
	s.count(1, len(tokens), todo)
	s.extendAll(todo, &r)
	return nil
}

// operands returns the appends and tokens of a step. logits reports that a text wants logits.
func operands(todo []work) (appends []la.Append, tokens []int, logits bool) {
	for _, w := range todo {
		at := w.text.seq.Len()
		appends = append(appends, la.Append{Seq: w.text.seq, Tokens: w.tokens})
		tokens = append(tokens, w.text.tokens[at:at+w.tokens]...)
		logits = logits || w.text.sampler.choice == nil && at+w.tokens == len(w.text.tokens)
	}
	return appends, tokens, logits
}

// draws returns the draws of a step: of each text whose tokens have then all been read. nil: these texts have the most likely token, or the
// host chooses.
func (s *scheduler) draws(todo []work) (all []draw) {
	for i, w := range todo {
		x := w.text.sampler
		if x.choice == nil || x.plain() || w.text.seq.Len()+w.tokens < len(w.text.tokens) {
			continue
		}
		if all == nil {
			all = make([]draw, len(todo))
		}
		all[i] = x.draw()
	}
	return all
}

// stepsAhead returns the number of steps that can be queued before the host has the tokens of earlier ones. It is 0 unless all
// texts are live, and the GPU chooses the tokens of all texts. A text begins with single steps, so that its first tokens come
// soon. Long steps stay single: their time hides the host's work, and a text that joins waits for all queued steps.
func (s *scheduler) stepsAhead(todo []work) int {
	steps := s.runner.mostAhead()
	if s.together > 0 && s.each > 0 {
		steps = min(steps, max(1, int(s.together/s.each)))
	}
	if len(todo) < len(s.live) || len(s.waiting) > 0 {
		return 0
	}
	before := 0 // steps that are queued
	if s.queued != nil {
		before = s.queued.steps
	}
	var appends []la.Append
	for _, w := range todo {
		t := w.text
		if w.tokens != 1 || t.sampler.choice == nil || t.mostGuesses > 0 {
			return 0
		}
		steps = min(steps, t.limit-len(t.tokens)-before, max(t.added()+before, 1))
		appends = append(appends, la.Append{Seq: t.seq})
	}
	for ; steps > 0; steps /= 2 {
		for i := range appends {
			appends[i].Tokens = steps
		}
		if need, err := s.runner.need(appends); err == nil && need <= s.runner.freePages() {
			break
		}
	}
	return max(steps, 0)
}

// queue queues steps.
func (s *scheduler) queue(todo []work, tokens []int, steps int) (*queued, error) {
	var appends []la.Append
	var draws []draw
	for _, w := range todo {
		appends = append(appends, la.Append{Seq: w.text.seq, Tokens: 1})
	}
	if slices.ContainsFunc(todo, func(w work) bool { return !w.text.sampler.plain() }) {
		for range steps {
			for _, w := range todo {
				draws = append(draws, w.text.sampler.draw())
			}
		}
	}
	began := s.now()
	wait, err := s.runner.ahead(appends, tokens, steps, draws)
	if err != nil {
		return nil, err
	}
	now := s.now()
	s.usual.queue = now.Sub(began) / time.Duration(steps)
	return &queued{todo, steps, now, wait}, nil
}

// collect waits for the queued steps, and gives the texts their tokens. If no text has ended, more steps are queued first: the GPU
// computes these steps while the host takes the tokens.
func (s *scheduler) collect() (err error) {
	defer s.sweep()
	q := s.queued
	began := q.began
	if s.taken.After(began) { // these steps were queued behind others
		began = s.taken
	}
	s.hold(q, began)
	var next *queued
	if s.goOn(q) {
		if steps := s.stepsAhead(q.todo); steps > 0 {
			if next, err = s.queue(q.todo, nil, steps); err != nil {
				return err
			}
		}
	}
	s.queued = next
	chosen, err := q.wait()
	if err != nil {
		return err
	}
	s.taken = s.now()
	s.each = s.taken.Sub(began) / time.Duration(q.steps)
	s.usual.took(len(q.todo), s.each)
	s.pace.took(len(q.todo), 0, s.each)
	s.count(q.steps, q.steps*len(q.todo), q.todo)
	own := make([]int, q.steps)
	for i, w := range q.todo {
		for j := range own {
			own[j] = chosen[j*len(q.todo)+i]
		}
		if !w.text.ended {
			w.text.take(own...)
		}
	}
	return nil
}

// hold waits until queued steps are almost done, if no other text wants to join. No further step is queued in the meantime, so a text that
// joins or is cancelled waits for the queued steps alone.
func (s *scheduler) hold(q *queued, began time.Time) {
	if s.together == 0 || s.usual.texts != len(q.todo) || !s.goOn(q) {
		return
	}
	end := began.Add(time.Duration(q.steps) * s.usual.step)
	if d := end.Sub(s.now()) - 2*s.usual.queue - holdSpare; d > 0 {
		s.sleep(d)
	}
}

// took takes the time of a step into account. A step that took unusually long says little about the next step.
func (u *usualTime) took(texts int, d time.Duration) {
	if texts != u.texts {
		u.texts, u.step = texts, d
	}
	u.step = min(d, u.step+u.step/holdGrowth)
}

// goOn reports whether all texts of queued steps are live, none was cancelled, and no other text wants to join.
func (s *scheduler) goOn(q *queued) bool {
	if s.joined() {
		return false
	}
	for _, w := range q.todo {
		if w.text.ended || w.text.ctx.Err() != nil {
			return false
		}
	}
	return true
}

func (s *scheduler) count(steps, rows int, todo []work) {
	s.stats.Steps += steps
	s.stats.Rows += rows
	s.stats.MostTexts = max(s.stats.MostTexts, len(todo))
}

// draft has each live text guess its next tokens, and returns the number of all guesses. While a text reads its prompt, or
// if the cache has too few pages, no text guesses.
func (s *scheduler) draft() (guesses int) {
	var appends []la.Append
	rows := s.runner.rows(true)
	for _, t := range s.live {
		t.guesses = nil
		if len(t.tokens)-t.seq.Len() != 1 {
			rows = 0
		}
	}
	if rows -= len(s.live); rows <= 0 {
		return 0
	}
	for _, t := range s.live {
		// One more token than the guesses is chosen.
		if most := min(t.nextGuesses, t.limit-len(t.tokens)-1, rows); most > 0 {
			t.guesses = t.lookup(most)
			guesses += len(t.guesses)
			rows -= len(t.guesses)
		}
		appends = append(appends, la.Append{Seq: t.seq, Tokens: 1 + len(t.guesses)})
	}
	if guesses == 0 {
		return 0
	}
	if need, err := s.runner.need(appends); err != nil || need > s.runner.freePages() {
		for _, t := range s.live {
			t.guesses = nil
		}
		return 0
	}
	return guesses
}

// verify computes a step with the guesses of all live texts, and keeps those that the texts choose, too.
func (s *scheduler) verify() (err error) {
	var appends []la.Append
	var tokens []int
	var todo []work
	for _, t := range s.live {
		appends = append(appends, la.Append{Seq: t.seq, Tokens: 1 + len(t.guesses)})
		tokens = append(append(tokens, t.tokens[len(t.tokens)-1]), t.guesses...)
		todo = append(todo, work{t, 1 + len(t.guesses)})
	}
	logits := slices.ContainsFunc(s.live, func(t *Text) bool { return !t.sampler.plain() })
	r, err := s.runner.run(appends, tokens, true, logits, nil) // how many draws a text takes is not known
	if err != nil {
		return err
	}
	s.count(1, len(tokens), todo)
	row := 0
	for _, t := range s.live {
		had, guesses := len(t.tokens), t.guesses
		accepted := 0
		for j := 0; j <= len(guesses); j++ {
			s.extend(t, &r, row+j)
			if t.ended || j == len(guesses) || t.tokens[had+j] != guesses[j] {
				break
			}
			accepted++
		}
		row += 1 + len(guesses)
		s.stats.Guessed += len(guesses)
		s.stats.Accepted += accepted
		if len(guesses) > 0 { // a wrong guess costs time: the next ones are a few more than were right
			t.nextGuesses = min(2*accepted+1, t.mostGuesses)
		}
		// Of the guesses the sequence keeps those that are tokens of the text.
		if keep := had + accepted; keep < t.seq.Len() {
			err = errors.Join(err, t.seq.Truncate(keep))
		}
		t.guesses = nil
	}
	return err
}

// close releases all sequences.
func (s *scheduler) close(err error) {
	s.fail(err)
	for len(s.retained) > 0 {
		s.evict(0)
	}
}
