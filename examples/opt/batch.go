package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/examples/opt/sample"
	"gorgonia.org/leanattention/internal/plural"
	"gorgonia.org/leanattention/nn"
)

// output receives the texts of a batch: the pieces of each text in order, for all texts at the same time.
type output interface {
	add(i int, piece string) error
	end(i int) error
}

// silent drops its pieces: the texts are used as a whole.
type silent struct{}

func (silent) add(int, string) error { return nil }
func (silent) end(int) error         { return nil }

// batch is the sequences that are continued together.
type batch struct {
	decoder   *model.Decoder
	tokenizer *tokenizer.Tokenizer
	chosen    bool   // the decoder chooses tokens
	ahead     bool   // the decoder may be some tokens ahead
	ends      []int  // tokens that end a text
	hint      string // possible reason for logits that are NaN or infinite
	limit     int    // most tokens to add to each sequence
	draft     int    // most tokens of a draft; 0: no drafts
	logprobs  int    // number of most likely tokens to keep with each token; 0: no probabilities
	sequences []sequence
	line      progress
	begin     func() output
	out       output // from the first token on
}

type sequence struct {
	prompt  []int        // tokens of the prompt that are still to be read
	shared  model.Shared // shared beginning, until the sequence has it
	waiting int          // a chosen token that no pass has read yet; -1: none
	left    int          // tokens that can still be appended
	lookup  lookup
	draft   []int // guesses that were appended after the last token, of which some may be wrong
	guesses int   // most tokens of the next draft
	sampler *sample.Sampler
	decoder *tokenizer.Decoder
	stop    *stopper
	result  continuation
}

// continuation is the text that was added to a prompt.
type continuation struct {
	tokens   []int // without the token that ends a text
	text     strings.Builder
	logprobs []choiceJSON
	reason   string // why the text ended; empty: it has not
	before   int    // if a stop text ended it: the number of tokens that are wholly before the stop text
}

// Why a text ended.
const (
	endEOS       = "eos"       // the model's end of text
	endStop      = "stop"      // a stop text
	endLength    = "length"    // -n
	endContext   = "context"   // the model's last position
	endInterrupt = "interrupt" // Ctrl-C
)

// choose sets the decoder's options for choosing tokens. On a GPU tokens are chosen where the logits are, unless the
// logits are wanted too.
func (o *options) choose(mo *model.Options) {
	greedy := o.sample.Temperature == 0
	mo.Seed = o.sample.Seed
	switch {
	case o.onGPU() && o.logprobs > 0:
	case greedy:
		mo.Greedy = true
	case o.onGPU():
		choice := nn.Choice{Temperature: o.sample.Temperature, TopK: o.sample.TopK, TopP: o.sample.TopP}
		mo.Choices = slices.Repeat([]nn.Choice{choice}, len(mo.Capacity))
	}
}

// newBatch returns a batch without sequences.
func (l *loaded) newBatch(mo *model.Options) *batch {
	b := &batch{tokenizer: l.tokenizer, ends: l.folder.EOS(), hint: l.hint(), limit: l.options.tokens, logprobs: l.options.logprobs}
	b.chosen = mo.Greedy || mo.Choices != nil
	b.ahead = b.chosen && (l.gpu != nil || l.options.ahead) && b.logprobs == 0 && mo.Draft == 0
	b.draft = mo.Draft
	return b
}

// fewestShared is the least number of tokens for which a sequence waits until another one has read them: fewer tokens
// are read as fast side by side.
const fewestShared = 16

// shared returns, for each prompt, the longest beginning that an earlier prompt also has. One token is always left to
// read: its logits are wanted.
func shared(prompts [][]int) []model.Shared {
	all := make([]model.Shared, len(prompts))
	begin := map[[fewestShared]int][]int{} // prompts by their first tokens
	for i, p := range prompts {
		if len(p) < fewestShared {
			continue
		}
		first := [fewestShared]int(p)
		for _, j := range begin[first] {
			other, n := prompts[j], fewestShared
			for n < min(len(p)-1, len(other)) && p[n] == other[n] {
				n++
			}
			if n > all[i].Tokens && n < len(p) {
				all[i] = model.Shared{From: j, Tokens: n}
			}
		}
		if len(begin[first]) < mostCompared {
			begin[first] = append(begin[first], i)
		}
	}
	return all
}

// mostCompared bounds the number of prompts with the same beginning that a prompt is compared with: there may be very
// many prompts.
const mostCompared = 64

// newSequence returns sequence i of a batch, which continues a text by at most left tokens. The decoder already has
// the first `has` tokens of the text.
func (l *loaded) newSequence(i int, text []int, has, left int) (sequence, error) {
	c := l.options.sample
	c.Stream = uint64(i)
	sampler, err := sample.New(c)
	return sequence{prompt: text[has:], guesses: l.options.guesses, lookup: lookup{text: slices.Clip(text)}, waiting: -1, left: left, sampler: sampler, decoder: l.tokenizer.NewDecoder(), stop: newStopper(l.options.stops)}, err
}

// run reads the prompts, and adds tokens until every sequence has ended: by a token that ends texts, a stop text, its
// number of tokens or the model's last position. Ended sequences rest. While prompts are read, sequences with
// finished prompts continue beside them.
func (b *batch) run(ctx context.Context) error {
	next, prompts := make([]int, len(b.sequences)), make([][]int, len(b.sequences))
	var ahead [][]int // tokens that have been chosen and appended already
	for {
		var now []int
		if len(ahead) > 0 {
			now, ahead = ahead[0], ahead[1:]
		}
		live, reading, burst := 0, 0, mostAhead
		for i := range b.sequences {
			s := &b.sequences[i]
			next[i], prompts[i] = s.waiting, s.prompt
			switch {
			case s.result.reason != "":
				continue
			case s.shared.Tokens > b.decoder.Len(s.shared.From): // waits for the other sequence
				prompts[i] = nil
				reading++
				continue
			case s.shared.Tokens > 0:
				if err := b.decoder.Share(i); err != nil {
					return err
				}
				s.shared = model.Shared{}
				reading++
				continue
			case len(s.prompt) > 0:
				reading++
				continue
			case s.waiting >= 0:
				live++
				burst = min(burst, s.left+1, b.limit-len(s.result.tokens))
				continue
			}
			if b.out == nil {
				b.line.rest()
				b.out = b.begin()
			}
			id, err := b.extend(i, now)
			if err != nil {
				return err
			}
			if s.result.reason != "" {
				continue
			}
			next[i] = id
			live++
			burst = min(burst, s.left+1, b.limit-len(s.result.tokens))
		}
		if live+reading == 0 {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		var err error
		done := false
		if b.draft > 0 && reading == 0 {
			done, err = b.speculate(next)
		}
		switch {
		case done || err != nil:
		case len(ahead) > 0:
		case reading > 0:
			err = b.mix(next, prompts)
		case b.ahead && live == len(next):
			ahead, err = b.decoder.Continue(next, burst)
		default:
			err = b.decoder.Step(next)
		}
		if err != nil {
			return err
		}
		if reading == 0 { // every sequence takes part
			for i := range b.sequences {
				b.sequences[i].waiting = -1
			}
		}
	}
}

// mix is a pass for prompts and tokens.
func (b *batch) mix(next []int, prompts [][]int) error {
	taken, err := b.decoder.Mix(next, prompts)
	if err != nil {
		return err
	}
	read, ready := 0, false
	for i, n := range taken {
		s := &b.sequences[i]
		switch {
		case len(s.prompt) > 0:
			s.prompt = s.prompt[n:]
			read, ready = read+n, ready || len(s.prompt) == 0
		case n > 0:
			s.waiting = -1
		default:
			s.waiting = next[i]
		}
	}
	b.line.show(read, ready)
	return nil
}

// mostAhead is the number of tokens that are computed before one is read, if that is faster: too few for a reader to
// notice.
const mostAhead = 8

// extend adds the model's choices to a text: the tokens of a draft that the model also chooses, and the token after
// them, which extend returns. The decoder has all others.
func (b *batch) extend(i int, chosen []int) (id int, err error) {
	s := &b.sequences[i]
	draft := s.draft
	for j := 0; ; j++ {
		logits, now := b.decoder.Logits(i), b.decoder.Chosen(i)
		if len(draft) > 0 {
			logits, now = b.decoder.LogitsAfter(i, j), b.decoder.ChosenAfter(i, j)
		}
		if chosen != nil {
			now = chosen[i]
		}
		if id, err = b.choose(i, logits, now); err != nil {
			at := b.decoder.Len(i) - len(draft) + j
			return 0, fmt.Errorf("after token %d of text %d: %w%s", at, i+1, err, b.hint)
		}
		if err := b.take(i, id, logits); err != nil {
			return 0, err
		}
		if s.result.reason == "" {
			s.left--
			s.lookup.text = append(s.lookup.text, id)
			if j < len(draft) && draft[j] == id {
				continue
			}
		}
		if len(draft) == 0 {
			return id, nil
		}
		// A wrong guess costs time: the next draft is slightly longer than the accepted part of this one.
		s.draft, s.guesses = nil, min(2*j+1, b.draft)
		return id, b.decoder.Accept(i, j+1)
	}
}

// choose returns a token by its logits, or the token that the decoder has chosen.
func (b *batch) choose(i int, logits []float32, id int) (int, error) {
	if !b.chosen {
		return b.sequences[i].sampler.Next(logits)
	}
	if id < 0 {
		return 0, fmt.Errorf("%w: a NaN or an infinity", sample.ErrLogits)
	}
	return id, nil
}

// take adds a token with the given logits to a text, which may end.
func (b *batch) take(i, id int, logits []float32) error {
	s := &b.sequences[i]
	special, _ := b.tokenizer.Special(id)
	var stopped bool
	var err error
	if slices.Contains(b.ends, id) {
		if stopped, err = b.write(i, s.decoder.Flush(), ""); err != nil {
			return err
		} else if stopped {
			return b.close(i, endStop)
		}
		// The token that ends a text may complete a stop text.
		stopped, err = b.write(i, "", cmp.Or(special, b.tokenizer.Decode([]int{id})))
		if err == nil && (!stopped || s.stop.at >= len(s.result.tokens)) {
			return b.end(i, endEOS)
		}
	} else {
		stopped, err = b.write(i, s.decoder.Add(id), special)
	}
	s.result.tokens = append(s.result.tokens, id)
	if b.logprobs > 0 {
		s.result.logprobs = append(s.result.logprobs, likelihood(logits, id, b.logprobs))
	}
	switch {
	case err != nil:
		return err
	case stopped:
		return b.close(i, endStop)
	case len(s.result.tokens) == b.limit:
		return b.end(i, endLength)
	case s.left == 0:
		return b.end(i, endContext)
	}
	return nil
}

// write continues a text up to a stop text, by a token's text and the name of a special token.
func (b *batch) write(i int, piece, special string) (stopped bool, err error) {
	r := &b.sequences[i].result
	piece, stopped = b.sequences[i].stop.add(piece, special)
	r.text.WriteString(piece)
	return stopped, b.out.add(i, piece)
}

// end ends a text, and writes text that was held back.
func (b *batch) end(i int, reason string) error {
	s := &b.sequences[i]
	stopped, err := b.write(i, s.decoder.Flush(), "")
	if err != nil {
		return err
	}
	if stopped {
		return b.close(i, endStop)
	}
	held := s.stop.flush()
	s.result.text.WriteString(held)
	if err := b.out.add(i, held); err != nil {
		return err
	}
	return b.close(i, reason)
}

func (b *batch) close(i int, reason string) error {
	s := &b.sequences[i]
	s.result.reason, s.result.before = reason, min(s.stop.at, len(s.result.tokens))
	return b.out.end(i)
}

// tellFull reports texts that ended before -n at the last of the model's positions.
func (b *batch) tellFull(w io.Writer, positions int) {
	full := 0
	for i := range b.sequences {
		if b.sequences[i].result.reason == endContext {
			full++
		}
	}
	which := "the text"
	if n := len(b.sequences); n > 1 {
		which = fmt.Sprintf("%d of %d texts", full, n)
	}
	if full > 0 {
		fmt.Fprint(w, plural.Mend(fmt.Sprintf("opt: %s ended early: the context is full, the model has %d positions\n", which, positions)))
	}
}

// interrupt ends all unfinished texts.
func (b *batch) interrupt() error {
	for i := range b.sequences {
		switch r := &b.sequences[i].result; {
		case r.reason != "":
		case b.out == nil: // no text has begun
			r.reason = endInterrupt
		default:
			if err := b.end(i, endInterrupt); err != nil {
				return err
			}
		}
	}
	return nil
}
