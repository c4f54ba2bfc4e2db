package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strings"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/tokenizer"
)

// conversation is the flags of leanlm chat.
type conversation struct {
	model    modelFlags
	sampling samplingFlags
	system   string
	tokens   int
	draft    int
}

// talk has a conversation: each line of standard input is a message, and each answer goes to standard output. Keys and values of
// earlier messages stay in the cache.
func talk(ctx context.Context, args []string, std streams) (err error) {
	var c conversation
	f := newFlags("chat", "chat has a conversation with a model that has a chat template. Each line of standard input is a message. Ctrl-C ends the answer and the conversation.")
	c.model.add(f)
	c.sampling.add(f)
	f.text(&c.system, "sys,system-prompt", "", "`text` of the system's message; without it, there is no such message")
	f.integer(&c.tokens, "n,predict,n-predict,max-new-tokens", 0, "most `tokens` of an answer; 0: as many as the context takes")
	f.integer(&c.draft, "draft,draft-n", 0, "most `tokens` to guess from what the conversation repeats, and to check in one step; 0: none")
	if err := f.parse(args, std); err != nil {
		return err
	}
	if c.tokens < 0 {
		return usagef("-n is %d, less than 0", c.tokens)
	}
	model, err := c.model.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, model.Close()) }()
	templates, err := model.Templates()
	if err != nil {
		return fmt.Errorf("%w: leanlm generate continues texts without a template", err)
	}
	ends, err := model.ChatEnds(templates)
	if err != nil {
		return err
	}
	how := c.sampling.of(model, std)
	c.model.options.Batch, c.model.options.Draft = 1, c.draft
	engine, err := c.model.engine(model, std)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()

	var messages []chat.Message
	if c.system != "" {
		messages = append(messages, chat.Message{Role: "system", Content: c.system})
	}
	in := bufio.NewReader(std.in)
	live := isTerminal(std.err)
	for ctx.Err() == nil {
		if live {
			fmt.Fprint(std.err, "> ")
		}
		line, readErr := in.ReadString('\n')
		if line = strings.TrimRight(line, "\r\n"); line != "" {
			messages = append(messages, chat.Message{Role: "user", Content: line})
			text, err := templates.Render(chat.Conversation{Messages: messages, AddGenerationPrompt: true})
			if err != nil {
				return err
			}
			ids, err := model.Tokenizer().Encode(text, tokenizer.Options{Special: true, Bare: true})
			if err != nil {
				return err
			}
			answer, err := say(ctx, engine, decoder.Request{Prompt: ids, Tokens: c.tokens, Sampling: how, Ends: ends, Draft: c.draft}, std)
			if err != nil {
				return err
			}
			messages = append(messages, chat.Message{Role: "assistant", Content: answer})
		}
		if readErr != nil {
			break
		}
	}
	return ctx.Err()
}

// say writes an answer.
func say(ctx context.Context, engine *decoder.Engine, r decoder.Request, std streams) (string, error) {
	text, err := engine.Start(ctx, r)
	if err != nil {
		return "", err
	}
	var answer strings.Builder
	for token, err := range text.Tokens() {
		if err != nil {
			return "", err
		}
		answer.WriteString(token.Text)
		if err := write(std, token.Text); err != nil {
			return "", err
		}
	}
	if text.Reason() == decoder.Full {
		fmt.Fprint(std.err, "the context is full: -c makes it larger\n")
	}
	return answer.String(), write(std, "\n")
}
