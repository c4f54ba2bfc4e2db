package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

// conversation is the flags of leanlm chat.
type conversation struct {
	model    modelFlags
	sampling samplingFlags
	long     longFlags
	system   string
	tools    string
	cache    string
	tokens   int
	stops    []string
	special  bool
	draft    int
	stats    bool
}

const chatAbout = `chat has a conversation with a model that has a chat template. Each line of standard input is a message, and a
line that ends with \ goes on in the next line. Answers go to standard output. Ctrl-C ends an answer, and without one the conversation.

` + sessionHelp

const sessionHelp = `Lines that begin with / are commands. A message that begins with / begins with //.
  /undo   drops the last message and its answer
  /regen  answers the last message again
  /tool NAME RESULT
          is the result of a tool that the answer calls: JSON or text. After a result for each call the model goes on
  /clear  drops all messages
  /fork   keeps the conversation as it is now, for /back
  /back   returns to the conversation of the last /fork
  /help   lists the commands
  /quit   ends the conversation, as /exit and Ctrl-D do
`

var sessionCommands = []string{"/undo", "/regen", "/tool", "/clear", "/fork", "/back", "/help", "/quit", "/exit"}

// session is a conversation. Keys and values of its messages stay in the engine's cache.
type session struct {
	flags     conversation
	std       streams
	live      bool // standard input is a terminal
	model     *opened
	engine    *decoder.Engine
	templates *chat.Templates
	tools     []json.RawMessage
	ends      []int
	sampling  decoder.Sampling
	cache     *promptCache // nil: none

	messages   []chat.Message
	turns      []turn
	results    []chat.Message // of /tool, while the answer's other calls have none
	forks      []fork
	asked      int
	unanswered int
}

// turn is a message, or results of tools, and the answer.
type turn struct {
	begin  int           // messages before
	called *chat.Message // the answer before results of tools, which may have another form since
	answer string        // with the names of special tokens
	tokens []int         // of the conversation up to the end of the answer, without the answer's last one, which is not computed
}

// fork is the state that /back returns to.
type fork struct {
	messages []chat.Message
	turns    []turn
}

// talk has a conversation.
func talk(ctx context.Context, args []string, std streams) (err error) {
	s := &session{std: std, live: isTerminal(std.in)}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.open(args); err != nil {
		return err
	}
	err = s.run(ctx)
	return errors.Join(err, s.save(ctx))
}

// open parses the flags, and opens the model.
func (s *session) open(args []string) (err error) {
	c := &s.flags
	f := newFlags("chat", chatAbout)
	c.model.add(f)
	c.sampling.add(f)
	c.long.add(f)
	f.text(&c.system, "sys,system-prompt", "", "`text` of the system's message; without it, there is no such message")
	f.text(&c.tools, "tools", "", "`file` with the tools that the model may call: a JSON list, as OpenAI's API has it. Calls are written as the model writes them, and /tool gives their results")
	f.text(&c.cache, "prompt-cache", "", "`file` that keeps the keys and values of the conversation: a later conversation whose text begins with the same 16 tokens or more, of the same model and with the same options, does not compute that beginning; messages are not kept; the file is made if there is none, and written at the end")
	f.integer(&c.tokens, "n,predict,n-predict,max-new-tokens", 0, "most `tokens` of an answer; 0: as many as the context takes, and with -context-shift any number")
	f.integer(&c.draft, "draft,draft-n", 0, "most `tokens` to guess from what the conversation repeats, and to check in one step; 0: none")
	f.stops(&c.stops)
	f.is(&c.special, "sp,special", showSpecial)
	f.is(&c.stats, "stats", "write what was computed after each answer to standard error")
	if err := f.parse(args, s.std); err != nil {
		return err
	}
	if c.tokens < 0 {
		return usagef("-n is %d, less than 0", c.tokens)
	}
	if s.tools, err = readTools(c.tools, s.std.in); err != nil {
		return err
	}
	if s.model, err = c.model.open(); err != nil {
		return err
	}
	if n := s.model.world.Size; n > 1 {
		return usagef("WORLD_SIZE is %d, and a conversation has one process: leanlm generate has ranks", n)
	}
	if s.templates, err = s.model.Templates(); err != nil {
		return fmt.Errorf("%w: leanlm generate continues texts without a template", err)
	}
	if s.ends, err = s.model.ChatEnds(s.templates); err != nil {
		return err
	}
	s.clear()
	if err := s.checkTools(); err != nil {
		return err
	}
	if c.cache != "" {
		if s.cache, err = openPromptCache(c.cache, "conversation", nil); err != nil {
			return err
		}
	}
	s.sampling = c.sampling.of(s.model, s.std)
	c.model.options.Batch, c.model.options.Draft = 1, c.draft
	if s.engine, err = c.model.engine(s.model, s.std); err != nil {
		return err
	}
	return s.cache.load(s.engine)
}

// save writes the conversation's keys and values to the file of -prompt-cache.
func (s *session) save(ctx context.Context) error {
	if s.cache == nil || len(s.turns) == 0 {
		return nil
	}
	s.cache.prompt = s.turns[len(s.turns)-1].tokens
	return s.cache.save(ctx, s.engine, s.std)
}

func (s *session) close() (err error) {
	err = s.cache.Close()
	if s.engine != nil {
		err = errors.Join(err, s.engine.Close())
	}
	if s.model != nil {
		err = errors.Join(err, s.model.Close())
	}
	return err
}

// run reads lines until the conversation ends.
func (s *session) run(ctx context.Context) error {
	input := &interruptible{ctx, s.std.in}
	in := bufio.NewReader(input)
	for ctx.Err() == nil {
		var stop func()
		input.ctx, stop = signal.NotifyContext(ctx, os.Interrupt)
		line, more, err := s.line(in)
		stop()
		switch {
		case err != nil:
			return err
		case strings.HasPrefix(line, "/") && !strings.HasPrefix(line, "//"):
			if line = strings.TrimSpace(line); line == "/quit" || line == "/exit" {
				more = false
			} else {
				err = s.command(ctx, line)
			}
		case line != "":
			err = s.turn(ctx, strings.TrimPrefix(line, "/"))
		}
		if err != nil {
			return err
		}
		if !more {
			break
		}
	}
	if len(s.results) > 0 {
		s.say("the conversation ends without results for all calls")
		s.unanswered++
	}
	if s.unanswered > 0 && !s.live {
		return fmt.Errorf("%d of %d messages had no answer", s.unanswered, s.asked)
	}
	return ctx.Err()
}

// line reads a message or a command. more reports whether another line may follow.
func (s *session) line(in *bufio.Reader) (line string, more bool, err error) {
	prompt := "> "
	for {
		if s.live {
			fmt.Fprint(s.std.err, prompt)
		}
		part, err := in.ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return "", false, err
		}
		part, goesOn := strings.CutSuffix(strings.TrimRight(part, "\r\n"), `\`)
		if line += part; !goesOn || err != nil {
			return line, err == nil, nil
		}
		line += "\n"
		prompt = "... "
	}
}

// say writes a line of the session's own to standard error.
func (s *session) say(format string, args ...any) {
	fmt.Fprintln(s.std.err, printable(fmt.Sprintf(format, args...)))
}

// command runs a command. A wrong command names the nearest right one. The returned error ends the conversation.
func (s *session) command(ctx context.Context, line string) error {
	name, rest, _ := strings.Cut(line, " ")
	switch {
	case name == "/tool":
		return s.result(ctx, strings.TrimSpace(rest))
	case line == "/regen":
		return s.again(ctx)
	}
	switch line {
	case "/help":
		fmt.Fprint(s.std.err, sessionHelp)
	case "/undo":
		if n := len(s.results); n > 0 {
			s.results = nil
			s.asked--
			s.say("dropped %d results of tools", n)
			return nil
		}
		if len(s.turns) == 0 {
			s.say("/undo: there is no message to drop")
			return nil
		}
		question := s.messages[s.turns[len(s.turns)-1].begin]
		s.undo()
		s.say("dropped %q and its answer", short(question.Content))
	case "/clear":
		s.clear()
		s.say("the conversation begins anew")
	case "/fork":
		s.forks = append(s.forks, fork{slices.Clone(s.messages), slices.Clone(s.turns)})
		s.say("fork %d, after %d messages", len(s.forks), len(s.turns))
	case "/back":
		if len(s.forks) == 0 {
			s.say("/back: there is no fork; /fork makes one")
			return nil
		}
		last := len(s.forks) - 1
		s.results = nil
		s.messages, s.turns, s.forks = s.forks[last].messages, s.forks[last].turns, s.forks[:last]
		s.say("back at fork %d, after %d messages", last+1, len(s.turns))
	default:
		s.say("no command %q%s; // begins a message that begins with /", short(line), nearCommand(line))
	}
	return nil
}

// nearCommand names the command that a wrong one may have meant, or all commands.
func nearCommand(line string) string {
	best, least := "", max(1, len(line)/3)+1
	for _, name := range sessionCommands {
		if d := distance(line, name); d < least {
			best, least = name, d
		}
		if len(line) > 1 && strings.HasPrefix(name, line) {
			best, least = name, 0
		}
	}
	if best != "" {
		return ": did you mean " + best + "?"
	}
	return ": the commands are " + strings.Join(sessionCommands, ", ")
}

// short cuts a text for a line of the session's own.
func short(text string) string {
	const most = 60
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "..."
}

// clear makes the conversation one without questions.
func (s *session) clear() {
	s.messages, s.turns, s.results = nil, nil, nil
	if s.flags.system != "" {
		s.messages = []chat.Message{{Role: "system", Content: s.flags.system}}
	}
}

// undo drops the last question, and all messages after it.
func (s *session) undo() {
	last := s.turns[len(s.turns)-1]
	s.messages, s.turns = s.messages[:last.begin], s.turns[:len(s.turns)-1]
	if last.called != nil {
		s.messages = slices.Clone(s.messages)
		s.messages[last.begin-1] = *last.called
	}
}

// turn adds a question, and writes the answer. The returned error ends the conversation.
func (s *session) turn(ctx context.Context, question string) error {
	s.asked++
	if len(s.results) > 0 {
		s.unanswered++
		s.say("the message was dropped: the answer's calls have %d results, and not all; /tool gives one, and /undo drops them", len(s.results))
		return nil
	}
	s.turns = append(slices.Clip(s.turns), turn{begin: len(s.messages)})
	s.messages = append(slices.Clip(s.messages), chat.Message{Role: "user", Content: question})
	ids, err := s.prompt()
	if err != nil {
		s.drop(err)
		return nil
	}
	return s.answer(ctx, ids)
}

// again answers the last message again.
func (s *session) again(ctx context.Context) error {
	if len(s.turns) == 0 || len(s.results) > 0 {
		s.say("/regen: there is no answer to write again")
		return nil
	}
	s.asked++
	s.messages = s.messages[:len(s.messages)-1]
	ids, err := s.prompt()
	if err != nil {
		s.drop(err)
		return nil
	}
	return s.answer(ctx, ids)
}

// answer writes the answer to the last message, of a conversation that has these tokens. The returned error ends the conversation.
func (s *session) answer(ctx context.Context, ids []int) error {
	answering, stop := signal.NotifyContext(ctx, os.Interrupt)
	defer stop()
	how := s.sampling
	how.Seed += uint64(s.asked - 1) // a question that is asked again has another answer
	r := decoder.Request{Prompt: ids, Tokens: s.flags.tokens, Sampling: how, Ends: s.ends, Stop: s.flags.stops, Special: s.flags.special, Draft: s.flags.draft}
	s.flags.long.set(&r, s.model)
	before := s.engine.Stats().Rows
	text, err := s.engine.Start(answering, r)
	if err != nil {
		s.drop(err)
		return nil
	}
	var answer strings.Builder
	var added []int
	for token, err := range text.Tokens() {
		if err != nil {
			s.drop(s.flags.model.hint(err))
			return write(s.std, "\n")
		}
		if token.ID >= 0 {
			added = append(added, token.ID)
		}
		answer.WriteString(token.Text)
		if err := write(s.std, token.Text); err != nil {
			return err
		}
	}
	content, t := answer.String(), s.model.Tokenizer()
	said := slices.DeleteFunc(slices.Clone(added), func(id int) bool { return slices.Contains(s.ends, id) })
	if s.flags.special {
		content = messageText(t, said, content, text.Reason() == decoder.Stopped)
	}
	last := &s.turns[len(s.turns)-1]
	last.answer = namedText(t, said)
	last.tokens = append(slices.Clone(ids), added[:max(0, len(added)-1)]...)
	s.messages = append(slices.Clip(s.messages), chat.Message{Role: "assistant", Content: content})
	if err := write(s.std, "\n"); err != nil {
		return err
	}
	if s.flags.stats {
		s.say("%d tokens before the answer, and %d in the answer; %d were computed; the context has %d", len(ids), len(added), s.engine.Stats().Rows-before, s.engine.Options().Context)
	}
	if n := text.Dropped(); n > 0 {
		s.say("%d tokens of the conversation were dropped for this answer: the context has %d", n, s.engine.Options().Context)
	}
	switch text.Reason() {
	case decoder.Full:
		s.say("the answer ends early: the context has %d tokens, %d of them of the messages before; %s, and -context-shift drops old tokens", s.engine.Options().Context, len(ids), makeRoom)
	case decoder.Cancelled:
		if !s.live {
			return context.Canceled
		}
	}
	return nil
}

const makeRoom = "/undo drops the last message and its answer, /clear drops all, -c makes the context larger"

// prompt returns the tokens of the conversation and of the beginning of an answer.
func (s *session) prompt() ([]int, error) {
	text, err := s.templates.Render(chat.Conversation{Messages: s.messages, Tools: s.tools, AddGenerationPrompt: true})
	if err != nil {
		return nil, err
	}
	ids, err := s.model.Tokenizer().Encode(text, tokenizer.Options{Special: true, Bare: true})
	if most := s.engine.Options().Context; err == nil && len(ids) > most && !s.flags.long.cut {
		err = fmt.Errorf("with it the conversation has %d tokens, and the context has %d; %s, and -keep drops old tokens", len(ids), most, makeRoom)
	}
	return ids, err
}

// drop drops the last question, which has no answer, and tells why.
func (s *session) drop(why error) {
	s.undo()
	s.unanswered++
	s.say("the message was dropped: %v", why)
}
