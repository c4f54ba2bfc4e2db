package serve

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"time"

	"gorgonia.org/leanattention/decoder"
)

// usage counts the tokens of a request.
type usage struct {
	Prompt     int          `json:"prompt_tokens"`
	Completion int          `json:"completion_tokens"`
	Total      int          `json:"total_tokens"`
	Details    usageDetails `json:"prompt_tokens_details"`
}

type usageDetails struct {
	Cached int `json:"cached_tokens"` // tokens of prompts whose keys and values were in the cache
}

// running is the texts of a request.
type running struct {
	server   *Server
	ctx      context.Context
	cancel   context.CancelCauseFunc
	release  func()
	common   *common
	texts    []*decoder.Text
	prompts  int // tokens
	tokens   int // of all continuations
	began    time.Time
	answered bool // the first token is there
}

// Causes of a request's end.
var (
	errStopping = &apiError{status: http.StatusServiceUnavailable, message: "the server is stopping"}
	errTime     = &apiError{status: http.StatusGatewayTimeout, message: "the request took too long"}
	errGone     = &apiError{status: 499, message: "the client has gone"} // a status of nginx
)

// start starts the texts of a request. The caller calls end.
func (s *Server) start(r *http.Request, c *common, prompts [][]int) (run *running, err error) {
	requests, err := c.finish(prompts)
	if err != nil {
		return nil, err
	}
	leave, err := s.enter(len(requests))
	if err != nil {
		return nil, err
	}
	run = &running{server: s, common: c, began: time.Now()}
	run.ctx, run.cancel = context.WithCancelCause(r.Context())
	unhook := context.AfterFunc(s.stopping, func() { run.cancel(errStopping) })
	most := s.options.Time
	if c.seconds > 0 {
		most = time.Duration(c.seconds * float64(time.Second))
	}
	timer := time.AfterFunc(most, func() { run.cancel(errTime) })
	run.release = func() { timer.Stop(); unhook(); leave() }
	if run.texts, err = s.engine.StartAll(run.ctx, requests...); err != nil {
		run.end()
		return nil, startError(err)
	}
	for _, p := range prompts {
		run.prompts += len(p)
	}
	s.metrics.prompt.Add(int64(run.prompts))
	return run, nil
}

// startError returns the error of a request that the engine refuses.
func startError(err error) error {
	switch {
	case errors.Is(err, decoder.ErrTooLong):
		return &apiError{status: http.StatusBadRequest, code: tooLong, message: err.Error()}
	case errors.Is(err, decoder.ErrClosed):
		return errStopping
	case errors.Is(err, decoder.ErrConfig):
		return &apiError{status: http.StatusBadRequest, message: err.Error()}
	}
	return err
}

// end cancels the texts that have not ended, waits for all texts, and lets other requests enter.
func (r *running) end() {
	r.cancel(errGone)
	for _, t := range r.texts {
		_, _ = t.Wait() // their errors were answered
	}
	r.release()
}

// piece is a token of a continuation, or the end of one.
type piece struct {
	token  *decoder.Token // nil: text that was held back, or the end
	text   string
	finish *string // set at the end
}

// each calls f with the pieces of a text in order, the last of which has finish. An error of f ends the text.
func (r *running) each(t *decoder.Text, f func(p piece) error) error {
	for token, err := range t.Tokens() {
		if err != nil {
			return r.failure(err)
		}
		p := piece{text: token.Text}
		if token.ID >= 0 {
			p.token = &token
		}
		if err := f(p); err != nil {
			return err
		}
	}
	switch t.Reason() {
	case decoder.End, decoder.Stopped:
		return f(piece{finish: &finishStop})
	case decoder.Length, decoder.Full:
		return f(piece{finish: &finishLength})
	}
	return r.failure(context.Cause(r.ctx))
}

var finishStop, finishLength = "stop", "length"

// failure returns why a text has no end of its own.
func (r *running) failure(err error) error {
	switch cause := context.Cause(r.ctx); {
	case errors.Is(cause, context.Canceled):
		return errGone
	case errors.Is(cause, context.DeadlineExceeded): // of the caller's server
		return errTime
	case cause != nil:
		return cause
	}
	if errors.Is(err, decoder.ErrClosed) {
		return errStopping
	}
	return fmt.Errorf("the engine failed: %w", err)
}

// count counts a token.
func (r *running) count() {
	r.tokens++
	m := r.server.metrics
	if m.completion.Add(1); !r.answered {
		r.answered = true
		m.first.observe(time.Since(r.began))
	}
}

func (r *running) usage() usage {
	u := usage{Prompt: r.prompts, Completion: r.tokens, Total: r.prompts + r.tokens}
	for i := 0; i < len(r.texts); i += r.common.best { // a prompt is read once
		u.Details.Cached += r.texts[i].Shared()
	}
	return u
}

// collected is a whole continuation.
type collected struct {
	index  int
	text   strings.Builder
	pieces []piece // with probabilities
	finish string
	sum    float64 // of log-probabilities
	tokens int
}

// mean returns the mean log-probability of the tokens.
func (c *collected) mean() float64 { return c.sum / float64(max(1, c.tokens)) }

// collect waits for all texts.
func (r *running) collect() ([]*collected, error) {
	all := make([]*collected, len(r.texts))
	for i, t := range r.texts {
		c := &collected{index: i}
		all[i] = c
		err := r.each(t, func(p piece) error {
			c.text.WriteString(p.text)
			if p.token != nil {
				c.tokens++
				c.sum += p.token.LogProb
				r.count()
			}
			if p.finish != nil {
				c.finish = *p.finish
			}
			if r.common.logprobs >= 0 {
				c.pieces = append(c.pieces, p)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// stream writes an event for each piece of all texts: the value that makes returns for the piece, or no event for nil. The event first
// comes before all pieces, unless first is nil. last makes the event of the usage.
func (r *running) stream(w http.ResponseWriter, first any, makes func(index int, p *piece) any, last func(*usage) any) error {
	type event struct {
		index int
		piece piece
		err   error
	}
	events, done := make(chan event), make(chan struct{})
	var texts sync.WaitGroup
	for i, t := range r.texts {
		texts.Go(func() {
			err := r.each(t, func(p piece) error {
				select {
				case events <- event{index: i, piece: p}:
					return nil
				case <-done:
					return errGone
				}
			})
			if err != nil {
				select {
				case events <- event{err: err}:
				case <-done:
				}
			}
		})
	}
	defer func() {
		close(done)
		r.cancel(errGone)
		texts.Wait()
	}()
	out := newEvents(w, r.server.options.Reader)
	send := func(v any) error {
		if v == nil {
			return nil
		}
		return out.send(v)
	}
	if err := send(first); err != nil {
		return err
	}
	for left := len(r.texts); left > 0; {
		e := <-events
		if e.err != nil {
			return out.fail(e.err)
		}
		if e.piece.token != nil {
			r.count()
		}
		if e.piece.finish != nil {
			left--
		} else if e.piece.text == "" && (e.piece.token == nil || r.common.logprobs < 0) {
			continue
		}
		if err := send(makes(e.index, &e.piece)); err != nil {
			return err
		}
	}
	if r.common.usage {
		u := r.usage()
		if err := send(last(&u)); err != nil {
			return err
		}
	}
	return out.done()
}

// events is a stream of server-sent events.
type events struct {
	w      http.ResponseWriter
	c      *http.ResponseController
	reader time.Duration // most time for an event
	begun  bool
}

func newEvents(w http.ResponseWriter, reader time.Duration) *events {
	return &events{w: w, c: http.NewResponseController(w), reader: reader}
}

func (e *events) write(data []byte) error {
	if !e.begun {
		e.begun = true
		h := e.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-cache")
		h.Set("X-Accel-Buffering", "no")
	}
	if err := e.c.SetWriteDeadline(time.Now().Add(e.reader)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return begunError{err}
	}
	for _, b := range [][]byte{[]byte("data: "), data, []byte("\n\n")} {
		if _, err := e.w.Write(b); err != nil {
			return begunError{err}
		}
	}
	if err := e.c.Flush(); err != nil {
		return begunError{err}
	}
	return nil
}

func (e *events) send(v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return e.fail(err)
	}
	return e.write(data)
}

func (e *events) done() error { return e.write([]byte("[DONE]")) }

// fail ends the stream with an error, which is an answer of its own if no event was written.
func (e *events) fail(err error) error {
	if !e.begun {
		return err
	}
	if w := e.write(asAPIError(err).body()); w != nil {
		return w
	}
	return begunError{err}
}

// begunError is an error behind the beginning of an answer, which cannot become another answer.
type begunError struct{ error }

func (e begunError) Unwrap() error { return e.error }

func newID(prefix string) string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return prefix + hex.EncodeToString(b[:])
}

// finite returns a number that JSON has.
func finite(x float64) float64 {
	if math.IsInf(x, -1) || math.IsNaN(x) {
		return -9999 // as OpenAI says it
	}
	return x
}
