package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/examples/opt/sample"
	"gorgonia.org/leanattention/internal/plural"

	"golang.org/x/term"
)

// session is a context to which lines are appended, and which is continued. The decoder has the keys and values of
// its tokens, except some at the end that are not read yet.
type session struct {
	l       *loaded
	mo      model.Options
	out     io.Writer
	sampler *sample.Sampler // of all turns

	context []int
	turns   []int // length of the context before each turn
	forks   []fork
}

// fork is the state that /back returns to.
type fork struct {
	of      *model.Fork
	context []int
	turns   []int
}

const sessionHelp = `A line is put behind the text as it is typed, and continued; \n in it is a new line and
\\ a backslash, and a line that begins with // begins with /. An empty line lets the text go on.
Ctrl-C ends a text, Ctrl-D the session.
  /undo  takes the last line and what followed it back
  /fork  keeps the text as it is now, for /back
  /back  returns to the last fork, which is gone then
  /quit  ends the session
  /help  writes this
`

// converse runs the session on a terminal.
func converse(ctx context.Context, o options, stdin io.Reader, stdout, stderr io.Writer) (err error) {
	in, err := terminalFile("standard input", stdin)
	if err != nil {
		return err
	}
	if _, err := terminalFile("standard output", stdout); err != nil {
		return err
	}
	l, err := load(o, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	s, err := newSession(l, stderr)
	if err != nil {
		return err
	}

	// From here on the terminal must be restored, whatever ends the process.
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	raw := rawTerminal{fd: int(in.Fd())}
	if err := raw.enter(); err != nil {
		return fmt.Errorf("-i: %w", err)
	}
	defer raw.leave() // after a panic, too
	keys := newKeyboard(ctx, in)
	t := term.NewTerminal(struct {
		io.Reader
		io.Writer
	}{keys, stdout}, "> ")
	s.out = t
	defer raw.stops(keys, func() { t.Write(nil) })() // writes the typed line again
	err = s.run(ctx, func() (string, error) {
		if width, height, err := term.GetSize(raw.fd); err == nil && width > 0 {
			t.SetSize(width, height) // the size may have changed
		}
		return t.ReadLine()
	}, keys.until)
	if e := raw.leave(); e != nil {
		err = errors.Join(err, fmt.Errorf("-i: putting the terminal back: %w", e))
	}
	if o.stats && err == nil {
		err = errors.Join(l.measureExchange(), l.writeStats(stderr))
	}
	return err
}

// terminalFile returns the file of rw, if it is a terminal.
func terminalFile(what string, rw any) (*os.File, error) {
	f, ok := rw.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil, usagef("-i needs a terminal, and %s is none", what)
	}
	return f, nil
}

// newSession builds a decoder for one context of all the model's positions, and for as much again in forks.
func newSession(l *loaded, stderr io.Writer) (*session, error) {
	most := l.config.MaxPositions
	s := &session{l: l, mo: model.Options{Capacity: []int{most}, ForkTokens: most, Draft: l.options.draftTokens()}}
	if l.options.linear == model.StockLinear {
		s.mo.Chunk = 16 // a line has few tokens, and recorded graphs compute all rows
	}
	l.options.choose(&s.mo)
	var err error
	if s.sampler, err = sample.New(l.options.sample); err != nil {
		return nil, err
	}
	return s, l.build(s.mo, stderr)
}

// run reads lines until the session ends. until sets the function that Ctrl-C calls, until stop is called.
func (s *session) run(ctx context.Context, line func() (string, error), until func(func()) func()) error {
	turn := func(text string) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer until(cancel)()
		return s.turn(ctx, text)
	}
	for i := range s.l.options.prompts {
		text := s.l.options.prompts[i]
		if _, err := io.WriteString(s.out, text); err != nil {
			return err
		}
		if err := turn(text); err != nil {
			return err
		}
	}
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		text, err := line()
		switch {
		case errors.Is(err, io.EOF):
			_, err := io.WriteString(s.out, "\n")
			return err
		case err != nil:
			return err
		case utf8.RuneCountInString(text) >= mostLine:
			err = s.say("a line has less than %d characters here, and this one may have been cut", mostLine)
		case strings.HasPrefix(text, "/") && !strings.HasPrefix(text, "//"):
			var quit bool
			if quit, err = s.command(strings.TrimSpace(text)); quit {
				return err
			}
		default:
			err = turn(unescape(text))
		}
		if err != nil {
			return err
		}
	}
}

// mostLine is the limit of golang.org/x/term: it drops what is typed beyond.
const mostLine = 4096

// unescape returns the text of a line.
func unescape(line string) string {
	if strings.HasPrefix(line, "//") {
		line = line[1:]
	}
	return strings.NewReplacer(`\\`, `\`, `\n`, "\n").Replace(line)
}

// say writes a line of the session's own.
func (s *session) say(format string, args ...any) error {
	_, err := io.WriteString(s.out, "opt: "+printable(plural.Mend(fmt.Sprintf(format, args...)))+"\n")
	return err
}

// command runs a line that begins with a slash.
func (s *session) command(line string) (quit bool, err error) {
	switch line {
	case "/quit":
		return true, nil
	case "/help":
		_, err = io.WriteString(s.out, sessionHelp)
		return false, err
	case "/undo":
		err = s.undo()
	case "/fork":
		err = s.fork()
	case "/back":
		err = s.back()
	default:
		return false, s.say("%q is none of /undo, /fork, /back, /quit, /help", line)
	}
	if err != nil {
		return false, s.say("%s: %v", line, err)
	}
	return false, nil
}

func (s *session) undo() error {
	if len(s.turns) == 0 {
		return errors.New("there is no line to take back")
	}
	last := len(s.turns) - 1
	if err := s.cut(s.context[:s.turns[last]]); err != nil {
		return err
	}
	s.turns = s.turns[:last]
	return s.say("%d tokens", len(s.context))
}

func (s *session) fork() error {
	f, err := s.l.decoder.Fork(0)
	if err != nil {
		return err
	}
	s.forks = append(s.forks, fork{f, slices.Clone(s.context), slices.Clone(s.turns)})
	return s.say("fork %d, of %d tokens", len(s.forks), len(s.context))
}

func (s *session) back() error {
	if len(s.forks) == 0 {
		return errors.New("there is no fork")
	}
	last := len(s.forks) - 1
	f := s.forks[last]
	if err := s.l.decoder.Return(0, f.of); err != nil {
		return err
	}
	s.forks, s.context, s.turns = s.forks[:last], f.context, f.turns
	return s.say("%d tokens, as at fork %d", len(s.context), last+1)
}

// cut makes the context one of which the decoder has the beginning, and nothing else.
func (s *session) cut(context []int) error {
	s.context = context
	if s.l.decoder.Len(0) <= len(context) {
		return nil
	}
	return s.l.decoder.Truncate(0, len(context))
}

// turn appends a text to the context, continues it, and reports its errors. The returned error is one of the output.
func (s *session) turn(ctx context.Context, text string) error {
	before, read := s.context, s.l.decoder.Stats().Prefill.Tokens
	out := &sessionOutput{w: s.out}
	result, err := s.extend(ctx, text, out)
	if out.err != nil {
		return out.err
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		if !out.begun { // the given line has a line of its own
			return errors.Join(s.say("%v", err), s.cut(before))
		}
		return errors.Join(s.say("the text ended with an error: %v", err), s.cut(before))
	}
	s.turns = append(s.turns, len(before))
	switch result.reason {
	case endEOS:
		err = s.say("the model ended the text")
	case endContext:
		err = s.say("the text ended early: the context is full, the model has %d positions; /undo makes room", s.mo.Capacity[0])
	default:
		err = nil
	}
	if err != nil {
		return err
	}
	if most := s.mo.Capacity[0]; s.l.options.stats { // a token at the very end is not read
		return s.say("read %d tokens, added %d; %d of %d", s.l.decoder.Stats().Prefill.Tokens-read, len(result.tokens), min(len(s.context), most), most)
	}
	return nil
}

// extend is a turn. After an error the context is unchanged, but the decoder may have more tokens.
func (s *session) extend(ctx context.Context, text string, out output) (*continuation, error) {
	d, most := s.l.decoder, s.mo.Capacity[0]
	var added []int
	if text != "" || len(s.context) == 0 {
		var err error
		added, err = s.l.encode(text, len(s.context) == 0, max(0, most-len(s.context)))
		if errors.Is(err, tokenizer.ErrTooLong) {
			way := "/undo makes room"
			if len(s.context) == 0 {
				way = "shorten it"
			}
			return nil, fmt.Errorf("the line has no room: it has %s, and %d of the model's %d positions are taken; %s", s.l.count(text, len(s.context) == 0), min(len(s.context), most), most, way)
		} else if err != nil {
			return nil, err
		}
	}
	all := slices.Concat(s.context, added)
	switch {
	case len(all) > most || len(all) == most && len(added) == 0:
		return nil, fmt.Errorf("the context is full: the model has %d positions; /undo makes room", most)
	case len(all) == 0:
		return nil, errors.New("there are no tokens yet that could be continued")
	}
	if d.Len(0) == len(all) { // a token must be read for the logits after it
		if err := d.Truncate(0, len(all)-1); err != nil {
			return nil, err
		}
	}
	b := s.l.newBatch(&s.mo)
	next, err := s.l.newSequence(0, all, d.Len(0), most-len(all))
	if err != nil {
		return nil, err
	}
	next.sampler = s.sampler
	b.decoder, b.sequences, b.begin = d, []sequence{next}, func() output { return out }
	b.line = progress{w: io.Discard, total: len(next.prompt), began: time.Now()}
	err = b.run(ctx)
	if err != nil && !errors.Is(err, context.Canceled) {
		return nil, err
	}
	err = errors.Join(err, b.interrupt())
	if s.l.first.prompt == 0 {
		s.l.first.prompt = b.line.first
	}
	r := &b.sequences[0].result
	return r, errors.Join(err, s.keep(all, r))
}

// keep makes the context equal to the screen: the tokens that were read and the chosen ones, up to a stop text.
func (s *session) keep(read []int, r *continuation) error {
	chosen, tokens := r.tokens, s.l.tokenizer
	if r.reason == endStop {
		text := r.text.String()
		n := r.before
		for n > 0 && !strings.HasPrefix(text, tokens.Decode(chosen[:n])) {
			n--
		}
		if err := s.cut(slices.Concat(read, chosen[:n])); err != nil {
			return err
		}
		rest := strings.TrimPrefix(text, tokens.Decode(chosen[:n]))
		more, err := tokens.Encode(rest, tokenizer.Options{Bare: true})
		s.context = append(s.context, more...)
		return err
	}
	return s.cut(slices.Concat(read, chosen))
}

// sessionOutput writes a text to the terminal as it grows.
type sessionOutput struct {
	w     io.Writer
	begun bool
	err   error
}

func (o *sessionOutput) write(s string) error {
	if o.err == nil && s != "" {
		o.begun = true
		_, o.err = io.WriteString(o.w, s)
	}
	return o.err
}

func (o *sessionOutput) add(_ int, piece string) error { return o.write(piece) }
func (o *sessionOutput) end(int) error                 { return o.write("\n") }
