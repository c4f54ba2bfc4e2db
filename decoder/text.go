package decoder

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

// Request is a text to continue.
type Request struct {
	Prompt []int // tokens; at least one
	Tokens int   // most tokens to add; 0: as many as the context takes

	Sampling Sampling
	Stop     []string // texts that end the continuation, which does not have them
	Ends     []int    // tokens that end the continuation; nil: those of the model
	Special  bool     // the text has the names of special tokens, too, and of the token that ends the text. Stop applies to the text with these names
	LogProbs int      // number of most likely tokens that come with each token; 0: no probabilities. Sampling does not change probabilities
	Draft    int      // most tokens to guess after each token from what the text has repeated; 0: none

	// Constraint, if not nil, says which tokens the text may have: see package jsonschema. Each text has a Constraint of its own. The host
	// chooses the tokens.
	Constraint Constraint

	// Cut shortens a prompt with more tokens than Options.Context, which is ErrTooLong otherwise. The first Keep tokens stay, and
	// as many of the last ones as leave Tokens of the context free, but at least half of those that the context has beyond Keep. If Tokens
	// is 0, that half stays.
	Cut bool

	// Shift continues a text whose context is full, which ends otherwise. The first Keep tokens stay, and the older half of the
	// others is dropped. The tokens that stay are computed again at their new positions. So the continuation is that of the
	// shortened text, and not an approximation by keys of the dropped tokens' context, as rotating cached keys gives. Penalties
	// of Sampling still count the dropped tokens. If Tokens is 0, the text ends only by Ends, by Stop, or when its context is done.
	Shift bool

	// Priority orders texts: those with a lower number come first, and wait last. Texts of one priority come in the order of their
	// requests. A text takes memory of the cache from texts with a higher number.
	Priority int

	Keep int // first tokens that Cut and Shift keep; less than Options.Context
}

// A Constraint says which tokens may continue a text. Tokens that Sampling forbids are not chosen, either: the text ends with [ErrLogits]
// if no token is left. The engine is locked during both calls, as are other engines of its GPU, so neither method may call one of them.
type Constraint interface {
	// Allowed returns the tokens that may come next: token i has bit i%64 of element i/64. Tokens of [Request].Ends are among them where
	// the text may end. The slice does not change until the call of Accept.
	Allowed() []uint64
	// Accept continues the text by one of these tokens.
	Accept(token int)
}

// Reason is why a text ended.
type Reason string

const (
	End       Reason = "end"       // a token that ends texts
	Stopped   Reason = "stop"      // a text of [Request].Stop
	Length    Reason = "length"    // [Request].Tokens
	Full      Reason = "context"   // [Options].Context
	Cancelled Reason = "cancelled" // the context was cancelled
	Late      Reason = "deadline"  // the deadline of the context came, before the text began or while the text was computed
)

// Token is a token that a model has chosen.
type Token struct {
	ID   int    // -1: no token; Text is the held-back end of a text that was cancelled or late
	Text string // the next piece of the text; "" while a character is incomplete, or a text of Stop may begin

	LogProb float64  // natural logarithm of the token's probability, with [Request].LogProbs
	Likely  []Likely // the most likely tokens, the first one first, with [Request].LogProbs
}

// Likely is a token that a model might have chosen.
type Likely struct {
	ID      int
	LogProb float64
}

// pieces turns tokens into text.
type pieces interface {
	Add(id int) string
	Flush() string
}

// silent has no text.
type silent struct{}

func (silent) Add(int) string { return "" }
func (silent) Flush() string  { return "" }

// Text is a continuation that an [Engine] computes. Its methods may be called by several goroutines.
type Text struct {
	ctx         context.Context
	priority    int
	swapped     *swapped // of a text that waits; nil: none
	pin         bool     // the prompt stays in the cache
	tokens      []int    // the prompt's and all others
	prompt      int      // tokens of the request's prompt
	limit       int      // most tokens
	full        bool     // the limit is that of the context
	context     int      // limit of the context
	most        int      // most tokens to add; 0: any number
	shift       bool     // drop tokens at the limit of the context
	keep        int      // first tokens that shift keeps
	shifted     bool     // tokens were dropped at the limit
	ends        []int
	seq         *la.Sequence // nil: the text waits
	shared      int          // tokens of the prompt that were forked
	guesses     []int
	nextGuesses int
	mostGuesses int
	sampler     *sampler
	tokenizer   *tokenizer.Tokenizer // nil: texts have no text
	decoder     pieces
	special     bool // decoder decodes special tokens to their names
	stop        *stopper
	ended       bool
	fresh       []Token // that are not in out yet
	compute     func()  // a step of the engine; nil: the engine computes by itself

	mu      sync.Mutex
	more    *sync.Cond
	out     []Token
	dropped int // tokens
	reason  Reason
	err     error
	done    bool
}

// Tokens yields the tokens of the continuation as they are chosen. Each token is yielded once. The error is that of
// [Text.Err], and the last thing that is yielded.
func (t *Text) Tokens() iter.Seq2[Token, error] {
	return func(yield func(Token, error) bool) {
		for {
			t.mu.Lock()
			for len(t.out) == 0 && !t.done {
				if t.compute == nil {
					t.more.Wait()
					continue
				}
				t.mu.Unlock()
				t.compute()
				t.mu.Lock()
			}
			out, err := t.out, t.err
			t.out = nil
			t.mu.Unlock()
			for i, token := range out {
				if !yield(token, nil) {
					t.mu.Lock()
					t.out = append(slices.Clone(out[i+1:]), t.out...)
					t.mu.Unlock()
					return
				}
			}
			if len(out) == 0 {
				if err != nil {
					yield(Token{}, err)
				}
				return
			}
		}
	}
}

// Wait waits for the end of the text, and returns what the prompt was continued with.
func (t *Text) Wait() (string, error) {
	var b strings.Builder
	for token, err := range t.Tokens() {
		if err != nil {
			return b.String(), err
		}
		b.WriteString(token.Text)
	}
	return b.String(), nil
}

// Reason returns why the text ended; "": it has not, or it ended with an error.
func (t *Text) Reason() Reason {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.reason
}

// Err returns the error that ended the text.
func (t *Text) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// Shared returns how many tokens of the prompt were not computed, since another text had the same beginning.
func (t *Text) Shared() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.shared
}

// extend chooses the next token by its logits.
func (t *Text) extend(logits []float32) {
	token, err := t.sampler.next(logits)
	t.add(token, err)
	t.publish()
}

// take is extend with the most likely tokens, of which -1 stands for logits that have none. It returns how many tokens the text
// has used: later ones come after its end.
func (t *Text) take(ids ...int) (used int) {
	for !t.ended && used < len(ids) {
		var err error
		if ids[used] < 0 {
			err = ErrLogits
		}
		t.add(Token{ID: ids[used]}, err)
		used++
	}
	t.publish()
	return used
}

// add adds a token, unless there was an error.
func (t *Text) add(token Token, err error) {
	if err != nil {
		t.end("", fmt.Errorf("decoder: after token %d: %w", len(t.tokens), err))
		return
	}
	special := "" // a name that is not in the text
	if t.tokenizer != nil && !t.special {
		special, _ = t.tokenizer.Special(token.ID)
	}
	var stopped bool
	if slices.Contains(t.ends, token.ID) {
		if t.special {
			token.Text, stopped = t.stop.add(t.decoder.Add(token.ID)+t.decoder.Flush(), "")
			t.last(token, End, stopped)
			return
		}
		if special == "" && t.tokenizer != nil {
			special = t.tokenizer.Decode([]int{token.ID})
		}
		if token.Text, stopped = t.stop.add(t.decoder.Flush(), ""); !stopped { // the token may complete a stop text
			var more string
			more, stopped = t.stop.add("", special)
			token.Text += more
		}
		t.last(token, End, stopped)
		return
	}
	t.tokens = append(t.tokens, token.ID)
	token.Text, stopped = t.stop.add(t.decoder.Add(token.ID), special)
	switch {
	case stopped:
		t.last(token, Stopped, true)
	case len(t.tokens) < t.limit || t.full && t.shift:
		t.emit(token)
	default:
		var more string
		more, stopped = t.stop.add(t.decoder.Flush(), "")
		token.Text += more
		reason := Length
		if t.full {
			reason = Full
		}
		t.last(token, reason, stopped)
	}
}

// last passes the last token on. Unless a stop text ended the text, the held-back piece belongs to the text.
func (t *Text) last(token Token, reason Reason, stopped bool) {
	if stopped {
		reason = Stopped
	} else {
		token.Text += t.stop.flush()
	}
	t.emit(token)
	t.finish(reason, nil)
}

// emit passes a token on with the next publish.
func (t *Text) emit(token Token) { t.fresh = append(t.fresh, token) }

// publish passes tokens on.
func (t *Text) publish() {
	if len(t.fresh) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.out = append(t.out, t.fresh...)
	t.fresh = t.fresh[:0]
	t.more.Broadcast()
}

// end ends the text for another reason than its tokens. The held-back piece belongs to the text.
func (t *Text) end(reason Reason, err error) {
	if t.ended {
		return
	}
	piece, stopped := t.stop.add(t.decoder.Flush(), "")
	if !stopped {
		piece += t.stop.flush()
	}
	if piece != "" {
		t.emit(Token{ID: -1, Text: piece})
	}
	t.finish(reason, err)
}

func (t *Text) finish(reason Reason, err error) {
	t.ended = true
	t.publish()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reason, t.err, t.done = reason, err, true
	t.more.Broadcast()
}

// How many of the last tokens are looked up: most at first, and then fewer. A single token predicts too little.
const (
	mostLookedUp   = 3
	fewestLookedUp = 2
)

// lookup guesses the next tokens from the text itself, as prompt lookup decoding does (Saxena, 2023,
// https://github.com/apoorvumang/prompt-lookup-decoding): if the last tokens occur earlier, the tokens after them there are
// guesses. If the earlier occurrence reaches the end of the text, the guesses go on with themselves: repeated text repeats
// again.
func (t *Text) lookup(most int) (guesses []int) {
	for n := min(mostLookedUp, len(t.tokens)-1); n >= fewestLookedUp; n-- {
		last := t.tokens[len(t.tokens)-n:]
		for at := len(t.tokens) - n - 1; at >= 0; at-- { // the latest occurrence is the most likely
			if !slices.Equal(t.tokens[at:at+n], last) {
				continue
			}
			for from := at + n; len(guesses) < most; from++ {
				if from < len(t.tokens) {
					guesses = append(guesses, t.tokens[from])
				} else {
					guesses = append(guesses, guesses[from-len(t.tokens)])
				}
			}
			return guesses
		}
	}
	return nil
}
