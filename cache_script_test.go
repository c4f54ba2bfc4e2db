package leanattention

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/script"

	"gorgonia.org/tensor"
)

// TestScript: caches, sequences and steps, command by command. What sequences hold, and what layers compute, is compared
// with attention over dense rows after each command. What is refused changes nothing, and Rollback restores all,
// to the order of the pool's free list.
//
//	cache pages N size N rows N [layers N] [heads N] [kvheads N] [type NAME]    a new cache, and a step of rows
//	new NAME, fork NAME OF, truncate NAME N, release NAME                       sequences
//	keep NAME FROM INDEX ...
//	need NAME N ...                                                             Cache.Need
//	chunks ROWS NAME N ...                                                      Chunks, and what Set says of each
//	add NAME N ...                                                              a whole step
//	set NAME N ...                                                              its parts; run can fail before a layer
//	run [fail LAYER]
//	commit
//	rollback
//	step HOW NAME N ...                                                         Step.Run, whose function ends so
//	rows                                                                        Step.Positions and Step.Last
//	show                                                                        the pages of all sequences
func TestScript(t *testing.T) {
	rng := reftest.Rand(t)
	var c *Cache
	var s *stepGraph
	var contexts map[string]*testContext
	var open []testAppend    // of the step that is set
	var fresh [][]*testToken // what they got in the last run, if that came to its end
	var before books         // when it was set
	types := map[string]tensor.Dtype{"float32": tensor.Float32, "float16": Float16, "bfloat16": BFloat16}
	close := func() {
		if s != nil {
			s.close()
		}
	}
	defer func() { close() }()
	appends := func(words []string) (list []testAppend) {
		for i := 0; i+1 < len(words); i += 2 {
			n, err := strconv.Atoi(words[i+1])
			x := contexts[words[i]]
			if words[i] == "none" {
				x = new(testContext)
			}
			if err != nil || x == nil {
				t.Fatalf("%q: %v", words, err)
			}
			list = append(list, testAppend{x, n})
		}
		return list
	}
	plain := func(list []testAppend) (a []Append) {
		for _, x := range list {
			a = append(a, Append{Seq: x.seq, Tokens: x.n})
		}
		return a
	}
	saves := func() map[string][]byte {
		saved := map[string][]byte{}
		for name, x := range contexts {
			var file bytes.Buffer
			if _, err := x.seq.WriteTo(&file); err != nil && !errors.Is(err, ErrState) { // a part of an open step
				t.Error(err)
			}
			saved[name] = file.Bytes()
		}
		return saved
	}
	do := func(words []string) (text string, err error) {
		number := func(i int) int {
			n, err := strconv.Atoi(words[i])
			if err != nil {
				t.Fatalf("%q: %v", words, err)
			}
			return n
		}
		switch words[0] {
		case "cache":
			close()
			config, rows, heads := CacheConfig{Layers: 3, KVHeads: 2, HeadDim: 4, ValueDim: 3}, 0, 4
			for i := 1; i < len(words); i += 2 {
				if words[i] == "type" {
					config.DType = types[words[i+1]]
					continue
				}
				*map[string]*int{"pages": &config.Pages, "size": &config.PageSize, "rows": &rows, "layers": &config.Layers, "heads": &heads, "kvheads": &config.KVHeads}[words[i]] = number(i + 1)
			}
			c = newTestCache(t, config)
			s, contexts, open = newStepGraph(t, c, rows, heads, tensor.Float32, WithCausal()), map[string]*testContext{}, nil
		case "new":
			contexts[words[1]] = &testContext{seq: newTestSequence(t, c)}
		case "fork":
			var f *Sequence
			if f, err = contexts[words[2]].seq.Fork(); err == nil {
				contexts[words[1]] = &testContext{f, slices.Clone(contexts[words[2]].tokens)}
			}
		case "truncate":
			x := contexts[words[1]]
			if err = x.seq.Truncate(number(2)); err == nil {
				x.tokens = x.tokens[:number(2):number(2)]
			}
		case "release":
			if err = contexts[words[1]].seq.Release(); err == nil {
				delete(contexts, words[1])
			}
		case "keep":
			x, from := contexts[words[1]], number(2)
			var path []int
			for i := range words[3:] {
				path = append(path, number(3+i))
			}
			if err = x.seq.Keep(from, path); err == nil {
				tokens := x.tokens[:from:from]
				for _, i := range path {
					tokens = append(tokens, x.tokens[from+i])
				}
				x.tokens = tokens
			}
		case "need":
			var n int
			if n, err = c.Need(plain(appends(words[1:]))); err == nil {
				text = fmt.Sprintf("%d pages", n)
			}
		case "chunks":
			todo, steps := plain(appends(words[2:])), 0
			done := make([]int, len(todo))
			for chunk, of := range Chunks(number(1), todo) {
				var line []string
				for i, a := range chunk {
					from := done[of[i]]
					done[of[i]] += a.Tokens
					line = append(line, fmt.Sprintf("%s [%d, %d)", words[2+2*of[i]], from, done[of[i]]))
				}
				if err := s.step.Set(chunk); err != nil {
					line = append(line, err.Error())
				} else {
					noError(t, s.step.Rollback())
				}
				text += strings.Join(line, ", ") + "\n"
				if steps++; steps > 9 {
					t.Fatalf("%q: no end", words)
				}
			}
			if steps == 0 {
				text = "no step"
			}
		case "add":
			s.advance(t, rng, appends(words[1:])...)
		case "set":
			was := booksOf(c)
			if err = set(s, appends(words[1:])...); err == nil {
				open, fresh, before = appends(words[1:]), nil, was
				text = fmt.Sprintf("%d pages taken", len(was.free)-len(booksOf(c).free))
			}
		case "run":
			failAt := 0
			if len(words) > 1 {
				failAt = number(2)
			}
			if fresh, err = s.attempt(rng, failAt, open...); errors.Is(err, errFault) {
				err = errFault // without Gorgonia's registers
			}
		case "commit":
			if err = s.step.Commit(); err == nil {
				for i, x := range open {
					x.tokens = append(x.tokens, fresh[i]...)
				}
				open = nil
			}
		case "rollback":
			reserved := booksOf(c)
			if err = s.step.Rollback(); err == nil {
				if after := booksOf(c); !after.equal(before) || len(open) > 0 && reserved.equal(before) {
					t.Errorf("rolled back: %+v, before %+v; with the step %+v", after, before, reserved)
				}
				open = nil
			}
		case "step":
			list, was, saved := appends(words[2:]), booksOf(c), saves()
			var inside []string
			var panicked any
			var ended bool
			f := func() (err error) {
				if fresh, err = s.attempt(rng, map[string]int{"fault": 1, "ignored": 1}[words[1]], list...); words[1] == "ignored" {
					return nil
				}
				switch words[1] {
				case "error":
					return fmt.Errorf("behind the last layer: %w", errFault)
				case "panic":
					panic(errFault)
				case "goexit":
					runtime.Goexit()
				case "nested":
					for _, e := range []error{s.step.Set(plain(list)), s.step.Run(plain(list), func() error { return nil }), s.step.Commit(), s.step.Rollback()} {
						inside = append(inside, e.Error())
					}
				}
				return err
			}
			switch words[1] {
			case "idle":
				f = func() error { return nil }
			case "none":
				f = nil
			}
			err, panicked, ended = outcome(func() error { return s.step.Run(plain(list), f) })
			if text = strings.Join(inside, "\n"); panicked != nil {
				text = fmt.Sprintf("panic: %v", panicked)
			} else if ended {
				text = "the goroutine has ended"
			}
			noError(t, c.Check())
			if err == nil && panicked == nil && !ended {
				for i, x := range list {
					x.tokens = append(x.tokens, fresh[i]...)
				}
				break
			}
			if errors.Is(err, errFault) && words[1] == "fault" {
				err = errFault // without Gorgonia's registers
			}
			if after := booksOf(c); !after.equal(was) || !maps.EqualFunc(saves(), saved, bytes.Equal) || len(open) == 0 && (s.step.open || s.step.managed || s.step.Last() != nil) {
				t.Errorf("%q left %+v, before %+v; or other tokens; or an open step: %v", words, after, was, s.step)
			}
		case "rows":
			positions, last := s.step.Positions(), s.step.Last()
			text = fmt.Sprintf("positions %v, last %v", positions, last)
			if positions == nil && last == nil {
				text = "none"
			}
			if len(positions)+len(last) > 0 { // they are the caller's
				positions[0] = 99
				last = append(last[:0], 99)
			}
		case "show":
			st := c.Stats()
			text = fmt.Sprintf("%d pages free, %d shared", st.FreePages, st.Shared)
			for _, name := range slices.Sorted(maps.Keys(contexts)) {
				q := contexts[name].seq
				text += fmt.Sprintf("\n%s: %d tokens in pages %v", name, q.Len(), q.table.Pages)
			}
		default:
			t.Fatalf("no command %q", words[0])
		}
		return text, err
	}
	script.Run(t, "testdata/cache.txt", func(words []string) (string, error) {
		var was books
		var slabs []byte
		if c != nil {
			was, slabs = booksOf(c), Slabs(c)
		}
		text, err := do(words)
		if err != nil && words[0] != "run" && words[0] != "step" && (!booksOf(c).equal(was) || !bytes.Equal(Slabs(c), slabs)) {
			t.Errorf("%q was refused, and left %+v, before %+v", words, booksOf(c), was)
		}
		for name, x := range contexts {
			if err := x.seq.checkTokens(x.tokens); err != nil {
				t.Errorf("behind %q: %s: %v", words, name, err)
			}
		}
		return text, err
	})
}

// outcome is what a call returns or panics with, or that it ends its goroutine.
func outcome(call func() error) (err error, panicked any, ended bool) {
	done := make(chan struct{})
	ended = true
	go func() {
		defer close(done)
		defer func() {
			if panicked = recover(); panicked != nil {
				ended = false
			}
		}()
		err = call()
		ended = false
	}()
	<-done
	return err, panicked, ended
}
